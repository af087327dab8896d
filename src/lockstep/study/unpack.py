"""Putting a pack (packed.py) in its place: a study and its runs, as if they had been made here.

Everything is unpacked into a temporary folder beside the runs, and the study is read there. Then whole folders are moved to their places, the
study last. If anything is wrong, the temporary folder is removed, and what was there before stays as it was.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import InputError
from lockstep.reading import Damaged, exists, read_file
from lockstep.run import Run, check_name, runs_root
from lockstep.study.folder import ROOM, StudyFolder
from lockstep.study.pack import LARGEST_MEMBER, STUDY, Manifest, Progress
from lockstep.study.packed import (
    Elsewhere,
    Files,
    content_bytes,
    extract,
    folders_of,
    manifest_of,
    opened,
    shown,
    writing_to,
)
from lockstep.study.private_paths import PrivatePaths


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
    with opened(file) as archive:
        manifest, entries = manifest_of(archive), {entry.filename: entry for entry in archive.infolist()}
        study, folders = folders_of(manifest)
        name = name or manifest.study
        _check_room(root, manifest)
        with _temporary(root) as place:
            for number, member in enumerate(manifest.members, 1):
                extract(archive, entries[member.name], member, _path(place, name, member.name))
                progress(number, len(manifest.members))
            _check_study(StudyFolder(place / ROOM / name), folders)
            return _install(place, root, name, study, folders, manifest)


def _path(root: Path, study: str, member: str) -> Path:
    """Where a member is unpacked: as in a folder of runs."""
    top, _, rest = member.partition("/")
    return root / ROOM / study / rest if top == STUDY else root / rest


def _check_study(folder: StudyFolder, runs: dict[str, Files]) -> None:
    """It can be read, and the runs are its own."""
    if not exists(folder.path / "study.json"):
        raise InputError("a pack without a study: it has no study.json")
    folder.read()
    started = {name for names in folder.started().values() for name in names}
    if strange := sorted(runs.keys() - started):
        raise InputError(f"{shown(strange[0])}: a run that the study did not start")


def _check_room(root: Path, manifest: Manifest) -> None:
    """Before anything is written: a full disk disturbs others too."""
    place = next(path for path in (root, *root.parents) if exists(path))
    with suppress(OSError):
        if shutil.disk_usage(place).free < content_bytes(manifest):
            raise Elsewhere(
                f"{content_bytes(manifest) / 1e9:,.1f} GB are to be unpacked, and {place} has not that much room: "
                "choose another place with --runs"
            )


@contextmanager
def _temporary(root: Path) -> Iterator[Path]:
    """A folder beside the runs, removed at the end. If the block fails, folders that were made for it go too."""
    made = [path for path in (root / ROOM, root, *root.parents) if not exists(path)]
    place = root / f".tmp-{os.urandom(4).hex()}-unpack"
    try:
        with writing_to(root):
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
        raise Elsewhere(
            f"study '{name}' is in {root} already, with other content: unpack this one under another --name"
        )
    new = [run for run in sorted(runs) if not exists(root / run)]
    for run in sorted(runs.keys() - set(new)):
        if not _same(root / run, runs[run], paths):
            raise Elsewhere(
                f"run '{run}' is in {root} already, with other content: unpack into another folder with --runs"
            )
    moves = [(place / run, root / run) for run in new] + ([(place / ROOM / name, target)] if is_new else [])
    moved: list[Path] = []
    try:
        for source, goal in moves:
            with writing_to(goal):
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
