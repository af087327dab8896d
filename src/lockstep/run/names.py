"""Names of runs, and the folder that all of them are in."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

from lockstep.errors import InputError
from lockstep.placement import Placement
from lockstep.reading import exists
from lockstep.recipe import Recipe
from lockstep.text import file_part, is_text

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
    if age_of(name) is not None:
        raise InputError(f"{option}{name}: that word stands for the newest {what}: choose another")


def new_id(recipe: Recipe, placement: Placement) -> str:
    """A readable name that sorts by time; the random tail keeps two starts in one second apart."""
    # Of a user's own, named as path/to/file.py:Net, the last part.
    model, launcher = (file_part(name.rpartition(":")[2], 40) for name in (recipe.model, placement.launcher))
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{model}-{launcher}-{placement.ranks}r-{secrets.token_hex(2)}"


def is_run_name(name: str) -> bool:
    """A folder whose name begins with a dot is on its way here, or on its way out (run/removal.py)."""
    return not name.startswith(".")


def run_folders(root: Path) -> list[Path]:
    """Every run folder below `root`, by name."""
    try:
        with os.scandir(root) as entries:
            names = sorted(
                entry.name for entry in entries if is_run_name(entry.name) and entry.is_dir(follow_symlinks=False)
            )
    except OSError:
        return []
    return [root / name for name in names if exists(root / name / "run.json")]


def age_of(name: str) -> int | None:
    """How many runs are newer than the one that 'last' or 'last~N' names, as git counts commits; None for another name."""
    if name == "last":
        return 0
    number = name.removeprefix("last~")
    return int(number) if number != name and number.isascii() and number.isdigit() and len(number) < 10 else None
