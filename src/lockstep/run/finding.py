"""Which run people mean: by path, id, tag, a part of the id, or 'last'."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from lockstep.errors import InputError
from lockstep.reading import is_file
from lockstep.run.names import age_of, run_folders
from lockstep.run.tags import tags_of


class _Created(msgspec.Struct):
    """The one field of run.json that says when; the others are skipped, which reads ten thousand files in half a second."""

    created: float


def by_age(folders: list[Path]) -> list[Path]:
    """The runs, newest first. Names do not tell: people choose them. A damaged run.json counts as the oldest."""

    def created(folder: Path) -> tuple[float, str]:
        try:
            path = folder / "run.json"
            moment = msgspec.json.decode(path.read_bytes(), type=_Created).created if path.is_file() else -math.inf
        except (OSError, ValueError, RecursionError):  # msgspec's errors are ValueErrors
            moment = -math.inf
        return moment, folder.name

    return sorted(folders, key=created, reverse=True)


def find_folder(name: str, root: Path) -> Path:
    """A run's folder by path, by id, by its tag, by the beginning or the end of its id, or 'last' ('last~1' is the one before it)."""
    if is_file(Path(name) / "run.json"):
        return Path(name)
    age = age_of(name)
    if age is None and "/" not in name and is_file(root / name / "run.json"):
        return root / name  # the whole id: no need to look at all the others
    folders = run_folders(root)
    if not folders:
        raise InputError(f"no runs in {root}: start one with 'lockstep run', or name another folder with --runs")
    if age is not None:
        if age >= len(folders):
            raise InputError(
                f"'{name}': there are {len(folders)} runs in {root}, so 'last~{len(folders) - 1}' is the oldest"
            )
        return by_age(folders)[age]
    # A tag is a whole name, and so comes before the beginnings of others.
    matches = (
        [folder for folder in folders if name in tags_of(folder)]
        or [folder for folder in folders if folder.name.startswith(name)]
        or [folder for folder in folders if folder.name.endswith(name)]
    )
    if len(matches) == 1:
        return matches[0]
    if matches:
        first, second = matches[0].name, matches[1].name
        more = "name one by its id" if name in tags_of(matches[0]) else "write more of the id"
        raise InputError(f"'{name}' fits {len(matches)} runs ({first}, {second}, …): {more}")
    raise InputError(f"no run '{name}' in {root}: 'lockstep runs' lists them")


def find_folders(name: str, root: Path) -> list[Path]:
    """As `find_folder`, where several runs may be meant: all that have the tag."""
    return [folder for folder in run_folders(root) if name in tags_of(folder)] or [find_folder(name, root)]
