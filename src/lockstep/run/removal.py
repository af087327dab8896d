"""Deleting runs: in one step, and only what nobody writes into any more."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

from lockstep.errors import InputError
from lockstep.reading import Damaged
from lockstep.run.errors import folder_error
from lockstep.run.folder import Run
from lockstep.run.status import DAMAGED, ENDED, STALLED_AFTER_S, current_status
from lockstep.run.tags import read_tags

# A run on its way out. A kill leaves such a folder behind, which nothing reads, and the next deletion removes.
_LEAVING, _LEFT = ".tmp-", "-deleted"


def why_kept(run: Run, root: Path) -> str:
    """Why a run must not be deleted; empty where it may be."""
    if run.folder.is_symlink() or not run.folder.parent.samefile(root):
        return f"it is not a folder in {root}: name its folder of runs with --runs"
    try:
        read_tags(run.folder)
    except Damaged as error:
        return f"its tags cannot be read, and one may be there to keep it: {error}"
    # That a rank is silent is a judgement of this moment, and it may go on: only a recorded end counts, or a supervisor that is gone.
    state = current_status(run.recorded_status(), [], list)["state"]
    if state in ENDED:
        return ""
    if state == DAMAGED:  # its status cannot be read: the ranks say whether they live
        alive = [beat for beat in run.rank_statuses() if time.time() - beat["time"] < STALLED_AFTER_S]
        return "its ranks give signs of life" if alive else ""
    if state == "planned":
        return (
            "it is planned, and may start at any moment: where nothing starts it any more, remove its folder yourself"
        )
    return f"it is {state}: stop it first, or wait for it to end"


def delete(run: Run, root: Path) -> None:
    """Delete a run of the folder `root`: it is gone in one step, and its files follow."""
    if why := why_kept(run, root):
        raise InputError(f"run {run.id} is not deleted: {why}")
    leaving = root / f"{_LEAVING}{os.urandom(4).hex()}{_LEFT}"
    try:
        run.folder.rename(leaving)
    except FileNotFoundError:
        return  # somebody else has deleted it
    except OSError as error:
        raise folder_error(run.folder, error) from None
    shutil.rmtree(leaving, ignore_errors=True)


def sweep(root: Path) -> None:
    """Remove what a killed deletion has left."""
    with suppress(OSError):
        for folder in root.glob(f"{_LEAVING}*{_LEFT}"):
            shutil.rmtree(folder, ignore_errors=True)


def size_of(folder: Path) -> int:
    """The bytes of its files, links not followed."""
    return sum(
        (Path(place) / name).lstat().st_size
        for place, _, names in os.walk(folder)
        for name in names
        if os.path.lexists(Path(place) / name)
    )
