"""Reading a pack (pack.py), which may come from anybody: nothing in it is executed, and nothing is written elsewhere.

Everything is unpacked into a temporary folder beside the runs and checked: names, counts and sizes by hard limits and
by the manifest, contents by their SHA-256, the study by reading it. Then whole folders are moved to their places, the
study last. If anything is wrong, the temporary folder is removed, and what was there before stays as it was.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from lockstep.errors import InputError, first_line
from lockstep.reading import Damaged, decode, exists, is_file, read_file
from lockstep.run import Run, check_name, runs_root
from lockstep.study.folder import ROOM, StudyFolder
from lockstep.study.pack import (
    FORMAT,
    LARGEST_CONTENT,
    LARGEST_MEMBER,
    MANIFEST,
    MOST_MEMBERS,
    RUNS,
    STUDY,
    Manifest,
    Member,
    Progress,
    is_plain,
)
from lockstep.study.private_paths import PrivatePaths
from lockstep.text import printable

LARGEST_MANIFEST = 64 << 20
# zipfile reads the table of contents into memory, at about ten times its size.
LARGEST_DIRECTORY = 32 << 20
CHUNK = 1 << 20
RESERVED = {ROOM, "races"}
"""Folders beside the runs, which no run can be."""
# What zipfile and zlib raise for an archive that is not sound.
BROKEN = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, ValueError, RuntimeError, OverflowError)
Files = dict[str, Member]
"""Members of one run or of the study, by their path within it."""


@dataclass
class Unpacked:
    """What was unpacked, and what was there already."""

    study: str
    folder: str
    packed_as: str
    """The study's name where it was packed."""
    lockstep: str
    """The version that packed it."""
    created: float
    runs: int
    new_runs: int
    is_new: bool
    """Whether the study itself was not there before."""


def unpack(
    file: Path,
    runs: Path | None = None,
    name: str | None = None,
    progress: Progress = lambda done, total: None,
) -> Unpacked:
    """Make a study and its runs from a pack. What is there already is kept; other content is an error."""
    if name is not None:
        check_name("--name ", name, "study")
    root = runs_root(runs).absolute()
    with _reading(file) as archive:
        manifest, entries = _manifest(archive), {entry.filename: entry for entry in archive.infolist()}
        study, folders = _folders(manifest)
        name = name or manifest.study
        _check_room(root, manifest)
        with _temporary(root) as place:
            for number, member in enumerate(manifest.members, 1):
                _extract(archive, entries[member.name], member, _path(place, name, member.name))
                progress(number, len(manifest.members))
            _check_study(StudyFolder(place / ROOM / name), folders)
            return _install(place, root, name, study, folders, manifest)


def _path(root: Path, study: str, member: str) -> Path:
    """Where a member is unpacked: as in a folder of runs."""
    top, _, rest = member.partition("/")
    return root / ROOM / study / rest if top == STUDY else root / rest


# ---------------------------------------------------------------- reading


@contextmanager
def _reading(file: Path) -> Iterator[zipfile.ZipFile]:
    """The zip, opened. Whatever is wrong with it is one line."""
    if not is_file(file):
        raise InputError(
            f"{file}: {'not a file' if exists(file) else 'no such file'}; 'lockstep study pack' writes one"
        )
    try:
        content = file.open("rb")
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}") from None
    try:
        with content:
            _check_directory(content)
            with zipfile.ZipFile(content) as archive:
                yield archive
    except InputError as error:
        # Errors about a place on disk say which place; errors about the pack say only what is wrong with it.
        raise InputError(str(error) if isinstance(error, _Elsewhere) else f"{file}: {error}") from None
    except BROKEN as error:
        raise InputError(f"{file}: damaged or cut off ({printable(first_line(error))[:200]})") from None


class _Elsewhere(InputError):
    """The pack is sound, and something else is in the way."""


def _check_directory(content: IO[bytes]) -> None:
    """Refuse a table of contents that is larger than that of any pack, before zipfile reads it into memory."""
    size = content.seek(0, os.SEEK_END)
    content.seek(max(0, size - 98))
    tail = content.read(98)
    if tail[-22:-18] != b"PK\5\6" or tail[-2:] != b"\0\0":
        raise InputError("not a pack of a study, or cut off")
    length = int.from_bytes(tail[-10:-6], "little")
    if tail[-42:-38] == b"PK\6\7":  # zip64: the record before says it again, with more digits
        length = max(length, int.from_bytes(tail[-58:-50], "little"))
    if length > LARGEST_DIRECTORY:
        raise InputError(f"its table of contents has {length / 1e6:,.0f} MB, more than that of any pack")
    content.seek(0)


class _Version(msgspec.Struct):
    format: int


def _manifest(archive: zipfile.ZipFile) -> Manifest:
    """The manifest, if it agrees with the table of contents, and both keep to the limits."""
    entries = archive.infolist()
    if len(entries) > MOST_MEMBERS + 1:
        raise InputError(f"{len(entries):,} files, and a pack has at most {MOST_MEMBERS:,}")
    for entry in entries:
        _check_entry(entry)
    there = {entry.filename: entry for entry in entries}
    if len(there) < len(entries):
        raise InputError("a file is in it twice")
    if MANIFEST not in there:
        raise InputError(f"not a pack of a study: it has no {MANIFEST}")
    with archive.open(there[MANIFEST]) as source:
        data = source.read(LARGEST_MANIFEST + 1)
    if len(data) > LARGEST_MANIFEST:
        raise InputError(f"{MANIFEST} is larger than that of any pack")
    if decode(data, _Version, MANIFEST).format > FORMAT:
        raise InputError("packed by a newer version of Lockstep: update Lockstep, then unpack it")
    manifest = decode(data, Manifest, MANIFEST)
    check_name(f"{MANIFEST}, study ", manifest.study, "study")
    if sorted([MANIFEST, *(member.name for member in manifest.members)]) != sorted(there):
        raise InputError(f"{MANIFEST} lists other files than there are")
    for member in manifest.members:
        if member.size > LARGEST_MEMBER or member.size != there[member.name].file_size:
            raise InputError(f"{_shown(member.name)}: larger than any record, or not of the size that {MANIFEST} says")
    if (total := _content(manifest)) > LARGEST_CONTENT:
        raise InputError(f"{total / 1e9:,.0f} GB of records, and a pack has at most {LARGEST_CONTENT >> 30} GiB")
    return manifest


def _check_entry(entry: zipfile.ZipInfo) -> None:
    """A plain file with a plain name, stored or deflated. Anything else was not written by us."""
    name, kind = entry.orig_filename, stat.S_IFMT(entry.external_attr >> 16)
    if name != entry.filename or not is_plain(name):
        raise InputError(f"{_shown(name)}: a name that no file of a pack has")
    if kind not in (0, stat.S_IFREG) or entry.is_dir():
        raise InputError(f"{_shown(name)}: a link, a folder or a device, and not a file")
    if entry.flag_bits & 1 or entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise InputError(f"{_shown(name)}: encrypted, or compressed in a way that packs do not use")


def _content(manifest: Manifest) -> int:
    return sum(member.size for member in manifest.members)


def _shown(name: str) -> str:
    return ascii(name[:80])


def _folders(manifest: Manifest) -> tuple[Files, dict[str, Files]]:
    """The members of the study, and those of each run by its id."""
    study: Files = {}
    runs: dict[str, Files] = {}
    names = {member.name for member in manifest.members}
    for member in manifest.members:
        top, *rest = member.name.split("/")
        if any("/".join([top, *rest[:depth]]) in names for depth in range(len(rest))):
            raise InputError(f"{_shown(member.name)}: below a file")
        if top == STUDY and rest:
            study["/".join(rest)] = member
        elif top == RUNS and len(rest) > 1 and rest[0].casefold() not in RESERVED:
            runs.setdefault(rest[0], {})["/".join(rest[1:])] = member
        else:
            raise InputError(f"{_shown(member.name)}: belongs neither to the study nor to a run")
    if lacking := [run for run, files in runs.items() if "run.json" not in files]:
        raise InputError(f"{_shown(lacking[0])}: a run without a run.json")
    return study, runs


def _extract(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, member: Member, path: Path) -> None:
    """Write one member. It ends where the manifest says that it does, whatever the archive holds."""
    digest, size = hashlib.sha256(), 0
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        target = path.open("xb")
    with target, archive.open(entry) as source:
        while data := source.read(CHUNK):
            size += len(data)
            if size > member.size:
                break
            digest.update(data)
            with _writing(path):
                target.write(data)
        with _writing(path):
            target.flush()
    if size != member.size or digest.hexdigest() != member.sha256:
        raise InputError(f"{_shown(member.name)}: not what was packed (its SHA-256 differs)")


def _check_study(folder: StudyFolder, runs: dict[str, Files]) -> None:
    """It can be read, and the runs are its own."""
    if not exists(folder.path / "study.json"):
        raise InputError("a pack without a study: it has no study.json")
    folder.read()
    started = {name for names in folder.started().values() for name in names}
    if strange := sorted(runs.keys() - started):
        raise InputError(f"{_shown(strange[0])}: a run that the study did not start")


# ---------------------------------------------------------------- writing


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _Elsewhere(f"cannot write {path}: {error.strerror}; choose another place with --runs") from None


def _check_room(root: Path, manifest: Manifest) -> None:
    """Before anything is written: a full disk disturbs others too."""
    place = next(path for path in (root, *root.parents) if exists(path))
    with suppress(OSError):
        if shutil.disk_usage(place).free < _content(manifest):
            raise _Elsewhere(
                f"{_content(manifest) / 1e9:,.1f} GB are to be unpacked, and {place} has not that much room: "
                "choose another place with --runs"
            )


@contextmanager
def _temporary(root: Path) -> Iterator[Path]:
    """A folder beside the runs, removed at the end. If the block fails, folders that were made for it go too."""
    made = [path for path in (root / ROOM, root, *root.parents) if not exists(path)]
    place = root / f".tmp-{os.urandom(4).hex()}-unpack"
    try:
        with _writing(root):
            (root / ROOM).mkdir(parents=True, exist_ok=True)
            place.mkdir()
        yield place
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        for path in made:
            with suppress(OSError):  # somebody else uses it by now
                path.rmdir()
        raise
    shutil.rmtree(place, ignore_errors=True)


def _install(place: Path, root: Path, name: str, study: Files, runs: dict[str, Files], manifest: Manifest) -> Unpacked:
    """Move into place what is not there yet: the runs, then the study. All of it, or nothing."""
    target = root / ROOM / name
    paths = PrivatePaths.of(
        StudyFolder(place / ROOM / name), root, [Run(root / run) for run in runs if exists(root / run)]
    )
    is_new = not exists(target)
    if not is_new and not _same(target, study, paths):
        raise _Elsewhere(
            f"study '{name}' is in {root} already, with other content: unpack this one under another --name"
        )
    new = [run for run in sorted(runs) if not exists(root / run)]
    for run in sorted(runs.keys() - set(new)):
        if not _same(root / run, runs[run], paths):
            raise _Elsewhere(
                f"run '{run}' is in {root} already, with other content: unpack into another folder with --runs"
            )
    moves = [(place / run, root / run) for run in new] + ([(place / ROOM / name, target)] if is_new else [])
    moved: list[Path] = []
    try:
        for source, goal in moves:
            with _writing(goal):
                source.rename(goal)
            moved.append(goal)
    except BaseException:
        for goal in reversed(moved):
            shutil.rmtree(goal, ignore_errors=True)
        raise
    return Unpacked(
        study=name,
        folder=str(target),
        packed_as=manifest.study,
        lockstep=manifest.lockstep,
        created=manifest.created,
        runs=len(runs),
        new_runs=len(new),
        is_new=is_new,
    )


def _same(folder: Path, files: Files, paths: PrivatePaths) -> bool:
    """Whether a folder has every one of these files. It may have more: weights, and what was measured since."""
    for name, member in files.items():
        path = folder / name
        try:
            data = None if path.is_symlink() else read_file(path, LARGEST_MEMBER)
        except Damaged:
            return False
        if data is None:
            return False
        # A run that was packed here still has the paths that its pack has not.
        if all(hashlib.sha256(form).hexdigest() != member.sha256 for form in (data, paths.removed(name, data))):
            return False
    return True
