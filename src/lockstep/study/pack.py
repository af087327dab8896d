"""A study as one file: its records, curves and environment, without weights, checkpoints and data (docs/studies.md).

A pack is a zip:

    runs/ID/…        what reports read of each of the study's runs
    study/…          the study's folder
    manifest.json    which members there are, with the size and the SHA-256 of each

Members are sorted and carry no times, so packing twice gives the same bytes, except for `created` in the manifest.
unpack.py reads packs.
"""

from __future__ import annotations

import hashlib
import os
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from lockstep.errors import InputError
from lockstep.files import replacing
from lockstep.measure.environment import version_of
from lockstep.reading import Damaged, exists, read_file
from lockstep.run import CHECKPOINTS, DATA, ENDED, Run
from lockstep.shapes import Count, Moment
from lockstep.study.folder import StudyFolder
from lockstep.study.private_paths import PrivatePaths
from lockstep.text import is_text
from lockstep.units import counted

FORMAT = 1
ENDING = ".study.zip"
MANIFEST = "manifest.json"
STUDY, RUNS = "study", "runs"
"""The two folders of a pack."""

# What a pack may have. Packing keeps to it, and unpacking refuses anything beyond it.
MOST_MEMBERS = 100_000
LARGEST_MEMBER = 256 << 20
LARGEST_CONTENT = 16 << 30
LONGEST_PART, LONGEST_PATH, DEEPEST = 200, 500, 16
"""Bytes of one name in a path, bytes of the path, and names in it."""

LARGEST_LOG = 256 << 10
LOGS = (".log", ".txt")
NO_RECORDS = {CHECKPOINTS, DATA, "proof", "starts", "lock"}
"""Files and folders that are left out wherever they are: weights, samples, tensors of `lockstep verify`, the rank
folders of a race, the lock."""
WEIGHTS = (".pt", ".pth", ".pt2", ".ckpt", ".safetensors", ".onnx", ".npy", ".npz", ".so", ".zip")

Progress = Callable[[int, int], None]
"""Called with how many files are done, and how many there are."""


class Member(msgspec.Struct, frozen=True):
    """One file of a pack."""

    name: str
    size: Count
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of manifest.json."""

    format: int = FORMAT
    lockstep: str
    created: Moment
    study: str
    members: Annotated[list[Member], Meta(max_length=MOST_MEMBERS)]


@dataclass
class Packed:
    """What was written."""

    study: str
    file: str
    bytes: int = 0
    content_bytes: int = 0
    """Of all members, before compression."""
    members: int = 0
    runs: int = 0
    under_way: int = 0
    """Runs that had not ended: the pack has them as they were at that moment."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Records that are not in the pack, by name, with the reason. Weights, checkpoints and data are not listed."""


def pack(
    folder: StudyFolder,
    output: Path,
    created: float | None = None,
    progress: Progress = lambda done, total: None,
    steps: bool = True,
) -> Packed:
    """Write a study as one file, which appears whole or not at all. Without `steps` it has no records of single steps."""
    folder = StudyFolder(folder.path.absolute())
    folder.read()  # a study that cannot be read is said to be damaged here, not where it is unpacked
    packed = Packed(folder.name, str(output))
    runs = [Run(folder.runs / name) for names in folder.started().values() for name in names]
    runs = [run for run in runs if exists(run.folder / "run.json")]
    files = _chosen(folder, runs, packed, _is_of_run if steps else _is_small)
    if f"{STUDY}/study.json" not in files:
        raise InputError(f"study '{folder.name}' cannot be packed: its study.json is not a plain file")
    if len(files) > MOST_MEMBERS:
        raise InputError(
            f"study '{folder.name}' has {counted(len(files), 'file')}, and a pack has at most {MOST_MEMBERS:,}: "
            "split the study"
        )
    paths = PrivatePaths.of(folder, folder.runs, runs)
    members = []
    with replacing(output) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:
        for number, (name, path) in enumerate(sorted(files.items()), 1):
            if (data := _read(name, path, paths, packed)) is not None:
                members.append(Member(name, len(data), hashlib.sha256(data).hexdigest()))
                packed.content_bytes += len(data)
                if packed.content_bytes > LARGEST_CONTENT:
                    raise InputError(
                        f"study '{folder.name}' has more than {LARGEST_CONTENT >> 30} GiB of records, the most that a "
                        "pack has: split the study"
                    )
                archive.writestr(entry_of(name), data)
            progress(number, len(files))
        manifest = Manifest(
            lockstep=version_of("lockstep") or "unknown",
            created=time.time() if created is None else created,
            study=folder.name,
            members=members,
        )
        archive.writestr(entry_of(MANIFEST), msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    packed.members, packed.bytes = len(members), output.stat().st_size
    packed.runs = sum(member.name.count("/") == 2 and member.name.endswith("/run.json") for member in members)
    return packed


def entry_of(name: str) -> zipfile.ZipInfo:
    """Without a time, so that the same content gives the same bytes."""
    entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    entry.compress_type, entry.create_system, entry.external_attr = zipfile.ZIP_DEFLATED, 3, 0o644 << 16
    return entry


def _read(name: str, path: Path, paths: PrivatePaths, packed: Packed) -> bytes | None:
    """What is packed of a file. It is read once: a run under way may change it at any moment."""
    try:
        data = read_file(path, LARGEST_MEMBER)
    except Damaged as error:
        packed.left_out[name] = str(error)
        return None
    data = None if data is None else paths.removed(name, data)
    if data is not None and len(data) > LARGEST_MEMBER:
        packed.left_out[name] = _too_large(len(data))
        return None
    return data


def _chosen(folder: StudyFolder, runs: list[Run], packed: Packed, wanted: Callable[[str], bool]) -> dict[str, Path]:
    """The files to pack, by the name of their member."""
    found = {f"{STUDY}/{name}": path for name, path in _records(folder.path, STUDY, _is_of_study, packed)}
    for run in runs:
        inside = f"{RUNS}/{run.id}"
        if run.folder.is_symlink():
            packed.left_out[inside] = "a link"
            continue
        files = {f"{inside}/{name}": path for name, path in _records(run.folder, inside, wanted, packed)}
        if f"{inside}/run.json" not in files:
            packed.left_out[inside] = "its run.json cannot be packed"
            continue
        found |= files
        packed.under_way += run.recorded_status()["state"] not in ENDED
    return found


def _is_of_study(name: str) -> bool:
    """Everything but weights and other archives: what a study records is small, and later versions may record more."""
    return not name.endswith(WEIGHTS)


def _is_of_run(name: str) -> bool:
    """The known kinds of records: users' own loops write what they like into a run's folder."""
    return name.endswith((".json", ".jsonl", *LOGS)) or name == "steps.bin" or ".tfevents." in name


def _is_small(name: str) -> bool:
    """Without what grows with every step."""
    return name.endswith((".json", ".jsonl")) and name not in ("trace.json", "operators.json")


def _records(folder: Path, inside: str, wanted: Callable[[str], bool], packed: Packed) -> Iterator[tuple[str, Path]]:
    """The records below a folder: path within it, and path on disk. Pipes, sockets and hidden files are skipped."""
    try:
        with os.scandir(folder) as entries:
            there = sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        packed.left_out[inside] = error.strerror or "cannot be read"
        return
    for entry in there:
        name = f"{inside}/{entry.name}"
        if entry.name in NO_RECORDS or entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False):
            for below, path in _records(Path(entry.path), name, wanted, packed):
                yield f"{entry.name}/{below}", path
        elif wanted(entry.name):
            if reason := _unfit(entry, name):
                packed.left_out[ascii(name)[1:-1]] = reason
            elif entry.is_file(follow_symlinks=False):
                yield entry.name, Path(entry.path)


def _unfit(entry: os.DirEntry[str], name: str) -> str:
    """Why a record is left out; "" where it is not."""
    try:
        size = entry.stat(follow_symlinks=False).st_size
    except OSError as error:  # removed since it was listed
        return error.strerror or "cannot be read"
    if entry.is_symlink():
        return "a link"
    if size > LARGEST_MEMBER or (size > LARGEST_LOG and entry.name.endswith(LOGS)):
        return _too_large(size)
    return "" if is_plain(name) else "a name that a pack cannot have"


def _too_large(size: int) -> str:
    return f"{size / 1e6:,.1f} MB are too much for a pack"


def is_plain(name: str) -> bool:
    """Whether a member's name leads to one file below the folder that it is unpacked in, on every system."""
    parts = name.split("/")
    if not is_text(name) or len(name.encode()) > LONGEST_PATH or len(parts) > DEEPEST:
        return False
    return all(
        part
        and not part.startswith(".")
        and part.isprintable()
        and not {"\\", ":"} & set(part)
        and len(part.encode()) <= LONGEST_PART
        for part in parts
    )
