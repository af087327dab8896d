"""A pack (pack.py) that may come from anybody, opened and checked: names, counts and sizes by hard limits and by the manifest, contents by
their SHA-256. Nothing in it is executed. unpack.py puts it in its place.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol, TypeVar

import msgspec

from lockstep.errors import InputError, first_line
from lockstep.reading import decode, exists, is_file
from lockstep.run import check_name
from lockstep.study.folder import ROOM
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
    is_plain,
)
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


class Listing(Protocol):
    """The part of a manifest that every kind of pack has."""

    @property
    def members(self) -> list[Member]: ...


L = TypeVar("L", bound=Listing)


@dataclass(frozen=True)
class Kind:
    """What a zip is said to be, and the command that writes such a one."""

    noun: str
    command: str


STUDY_PACK = Kind("pack of a study", "lockstep study pack")


@contextmanager
def opened(file: Path, kind: Kind = STUDY_PACK) -> Iterator[zipfile.ZipFile]:
    """The zip, opened. Whatever is wrong with it is one line."""
    if not is_file(file):
        raise InputError(f"{file}: {'not a file' if exists(file) else 'no such file'}; '{kind.command}' writes one")
    try:
        content = file.open("rb")
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}") from None
    try:
        with content:
            _check_directory(content, kind)
            with zipfile.ZipFile(content) as archive:
                yield archive
    except InputError as error:
        # Errors about a place on disk say which place; errors about the pack say only what is wrong with it.
        raise InputError(str(error) if isinstance(error, Elsewhere) else f"{file}: {error}") from None
    except BROKEN as error:
        raise InputError(f"{file}: damaged or cut off ({printable(first_line(error))[:200]})") from None


class Elsewhere(InputError):
    """The pack is sound, and something else is in the way."""


def _check_directory(content: IO[bytes], kind: Kind) -> None:
    """Refuse a table of contents that is larger than that of any pack, before zipfile reads it into memory."""
    size = content.seek(0, os.SEEK_END)
    content.seek(max(0, size - 98))
    tail = content.read(98)
    if tail[-22:-18] != b"PK\5\6" or tail[-2:] != b"\0\0":
        raise InputError(f"not a {kind.noun}, or cut off")
    length = int.from_bytes(tail[-10:-6], "little")
    if tail[-42:-38] == b"PK\6\7":  # zip64: the record before says it again, with more digits
        length = max(length, int.from_bytes(tail[-58:-50], "little"))
    if length > LARGEST_DIRECTORY:
        raise InputError(f"its table of contents has {length / 1e6:,.0f} MB, more than that of any pack")
    content.seek(0)


class _Version(msgspec.Struct):
    format: int


def manifest_of(archive: zipfile.ZipFile) -> Manifest:
    """The manifest of a packed study."""
    manifest = listing_of(archive, Manifest, STUDY_PACK)
    check_name(f"{MANIFEST}, study ", manifest.study, "study")
    return manifest


def listing_of(archive: zipfile.ZipFile, shape: type[L], kind: Kind) -> L:
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
        raise InputError(f"not a {kind.noun}: it has no {MANIFEST}")
    with archive.open(there[MANIFEST]) as source:
        data = source.read(LARGEST_MANIFEST + 1)
    if len(data) > LARGEST_MANIFEST:
        raise InputError(f"{MANIFEST} is larger than that of any pack")
    if decode(data, _Version, MANIFEST).format > FORMAT:
        raise InputError("packed by a newer version of Lockstep: update Lockstep, then unpack it")
    manifest = decode(data, shape, MANIFEST)
    if sorted([MANIFEST, *(member.name for member in manifest.members)]) != sorted(there):
        raise InputError(f"{MANIFEST} lists other files than there are")
    for member in manifest.members:
        if member.size > LARGEST_MEMBER or member.size != there[member.name].file_size:
            raise InputError(f"{shown(member.name)}: larger than any record, or not of the size that {MANIFEST} says")
    if (total := content_bytes(manifest)) > LARGEST_CONTENT:
        raise InputError(f"{total / 1e9:,.0f} GB of records, and a pack has at most {LARGEST_CONTENT >> 30} GiB")
    return manifest


def _check_entry(entry: zipfile.ZipInfo) -> None:
    """A plain file with a plain name, stored or deflated. Anything else was not written by us."""
    name, kind = entry.orig_filename, stat.S_IFMT(entry.external_attr >> 16)
    if name != entry.filename or not is_plain(name):
        raise InputError(f"{shown(name)}: a name that no file of a pack has")
    if kind not in (0, stat.S_IFREG) or entry.is_dir():
        raise InputError(f"{shown(name)}: a link, a folder or a device, and not a file")
    if entry.flag_bits & 1 or entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise InputError(f"{shown(name)}: encrypted, or compressed in a way that packs do not use")


def content_bytes(manifest: Listing) -> int:
    return sum(member.size for member in manifest.members)


def shown(name: str) -> str:
    return ascii(name[:80])


def folders_of(manifest: Manifest) -> tuple[Files, dict[str, Files]]:
    """The members of the study, and those of each run by its id."""
    study: Files = {}
    runs: dict[str, Files] = {}
    names = {member.name for member in manifest.members}
    for member in manifest.members:
        top, *rest = member.name.split("/")
        if any("/".join([top, *rest[:depth]]) in names for depth in range(len(rest))):
            raise InputError(f"{shown(member.name)}: below a file")
        if top == STUDY and rest:
            study["/".join(rest)] = member
        elif top == RUNS and len(rest) > 1 and rest[0].casefold() not in RESERVED:
            runs.setdefault(rest[0], {})["/".join(rest[1:])] = member
        else:
            raise InputError(f"{shown(member.name)}: belongs neither to the study nor to a run")
    if lacking := [run for run, files in runs.items() if "run.json" not in files]:
        raise InputError(f"{shown(lacking[0])}: a run without a run.json")
    return study, runs


def extract(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, member: Member, path: Path) -> None:
    """Write one member. It ends where the manifest says that it does, whatever the archive holds."""
    digest, size = hashlib.sha256(), 0
    with writing_to(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        target = path.open("xb")
    with target, archive.open(entry) as source:
        while data := source.read(CHUNK):
            size += len(data)
            if size > member.size:
                break
            digest.update(data)
            with writing_to(path):
                target.write(data)
        with writing_to(path):
            target.flush()
    if size != member.size or digest.hexdigest() != member.sha256:
        raise InputError(f"{shown(member.name)}: not what was packed (its SHA-256 differs)")


@contextmanager
def writing_to(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Elsewhere(f"cannot write {path}: {error.strerror}; choose another place with --runs") from None
