"""What a proof begins with, from the command line and from Python: what can be proven at all, a folder for its short runs, and one for its page."""

from __future__ import annotations

import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.errors import InputError
from lockstep.placement import Placement, changes_mathematics
from lockstep.recipe import Recipe
from lockstep.run import folder_error, runs_root
from lockstep.text import file_part

ROOM = "proofs"


def check(recipe: Recipe, placement: Placement) -> str | None:
    """InputError where there is nothing to prove; else what is to be expected of a placement that changes the mathematics."""
    if placement.ranks < 2:
        raise InputError(f"ranks={placement.ranks}: there is nothing to compare; choose ranks=2 or more")
    if placement.hosts > 1 and not placement.emulated and placement.launcher != "slurm":
        raise InputError(
            f"hosts={placement.hosts}: verify starts everything by itself; choose hosts=1, hosts=emulated:{placement.hosts} or launcher=slurm"
        )
    changed = changes_mathematics(placement, recipe)
    return changed and f"this placement changes the mathematics, so differences are expected: {changed}"


@contextmanager
def short_runs(runs: Path | None, keep: bool = False) -> Iterator[Path]:
    """A folder with the runs, not in the system's temporary folder: the ranks of other hosts have to see it."""
    root = runs_root(runs).absolute()
    try:
        root.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".verify-", dir=root))
    except OSError as error:
        raise folder_error(root / ".verify", error) from None
    try:
        yield folder
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def page_folder(runs: Path | None, script: str) -> Path:
    """Where the page of a script's proof is kept: RUNS/proofs/TIME-SCRIPT."""
    safe = file_part(script.removesuffix(".py"), 40)
    folder = runs_root(runs) / ROOM / f"{time.strftime('%Y%m%d-%H%M%S')}-{safe}-{secrets.token_hex(2)}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise folder_error(folder, error) from None
    return folder.absolute()
