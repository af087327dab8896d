"""What to tell a user whose run folder cannot be made or written."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.errors import InputError
from lockstep.reading import exists

TRIAL_BYTES = 1 << 20
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class FolderExists(InputError):
    """The folder of a new run is there already."""


class FolderError(InputError):
    """The run folder cannot be written."""


def folder_error(folder: Path, error: OSError) -> FolderError:
    """What to tell a user whose run folder cannot be written."""
    if error.errno in NO_ROOM:
        return FolderError(
            f"no room for the run in {folder.parent}: free some space, or choose another place with --runs"
        )
    beneath = error.filename is None or not folder.is_relative_to(
        error.filename
    )  # else it is the folder that could not be made
    if error.errno == errno.ENOENT and beneath and not exists(folder):
        return FolderError(f"the run folder {folder} was removed while the run was under way")
    return FolderError(f"cannot write the run folder {folder}: {error.strerror}; choose another place with --runs")


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Around what is written into a run folder: where that fails, the user is told in one line."""
    try:
        yield
    except OSError as error:
        raise folder_error(folder, error) from None


def folder_problem(folder: Path) -> FolderError | None:
    """Why the run folder cannot be written at this moment, found by trying; None where it can."""
    trial = folder / f".trial.{os.getpid()}"
    try:
        try:
            with trial.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, TRIAL_BYTES)
        finally:
            trial.unlink(missing_ok=True)
    except OSError as error:
        return folder_error(folder, error)
    return None
