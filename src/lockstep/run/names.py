"""Names of runs, and the folder that all of them are in."""

from __future__ import annotations

import math
import os
import secrets
import time
from pathlib import Path

import msgspec

from lockstep.errors import InputError
from lockstep.placement import Placement
from lockstep.reading import exists, is_file
from lockstep.recipe import Recipe
from lockstep.text import is_text

LONGEST_NAME = 200


def runs_root(given: Path | None = None) -> Path:
    """Where runs go: --runs, else LOCKSTEP_RUNS, else ./runs."""
    root = given or Path(os.environ.get("LOCKSTEP_RUNS") or "runs")
    if not is_text(str(root)) or "\0" in str(root):
        raise InputError(
            f"the folder of runs, '{root}', has a name that is not valid text (UTF-8): choose another with --runs"
        )
    return root


def check_name(option: str, name: str, what: str) -> None:
    """A name becomes a folder, and is written into files and pages. File systems allow 255 bytes; what goes before and after needs some."""
    if not name or name.startswith(".") or "/" in name or not is_text(name) or not name.isprintable():
        raise InputError(f"{option}{name!r}: a {what}'s name is one plain word, without '/' and not starting with '.'")
    if len(name.encode()) > LONGEST_NAME:
        raise InputError(
            f"{option}{name[:20]}…: a {what}'s name has at most {LONGEST_NAME} bytes, and this has {len(name.encode())}"
        )
    if _age(name) is not None:
        raise InputError(f"{option}{name}: that word stands for the newest {what}: choose another")


def new_id(recipe: Recipe, placement: Placement) -> str:
    """A readable name that sorts by time; the random tail keeps two starts in one second apart."""
    model = recipe.model.rpartition(":")[2] if ":" in recipe.model else recipe.model
    safe = "".join(c if c.isalnum() or c in "-_" else "-" for c in model)[:40]
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{safe}-{placement.launcher}-{placement.ranks}r-{secrets.token_hex(2)}"


def run_folders(root: Path) -> list[Path]:
    """Every run folder below `root`, by name."""
    try:
        with os.scandir(root) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []
    return [root / name for name in names if exists(root / name / "run.json")]


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
    """A run's folder by path, by id, by the beginning or the end of its id, or 'last' ('last~1' is the one before it)."""
    if is_file(Path(name) / "run.json"):
        return Path(name)
    age = _age(name)
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
    matches = [folder for folder in folders if folder.name.startswith(name)] or [
        folder for folder in folders if folder.name.endswith(name)
    ]
    if len(matches) == 1:
        return matches[0]
    if matches:
        first, second = matches[0].name, matches[1].name
        raise InputError(f"'{name}' fits {len(matches)} runs ({first}, {second}, …): write more of the id")
    raise InputError(f"no run '{name}' in {root}: 'lockstep runs' lists them")


def _age(name: str) -> int | None:
    """How many runs are newer than the one that 'last' or 'last~N' names, as git counts commits; None for another name."""
    if name == "last":
        return 0
    number = name.removeprefix("last~")
    return int(number) if number != name and number.isascii() and number.isdigit() and len(number) < 10 else None
