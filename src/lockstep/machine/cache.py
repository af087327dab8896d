"""The folder where Lockstep keeps what it finds out and fetches, and how processes take turns in it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.errors import InputError


def cache_folder() -> Path:
    """LOCKSTEP_DATA, else $XDG_CACHE_HOME/lockstep/data, else ~/.cache/lockstep/data."""
    chosen = os.environ.get("LOCKSTEP_DATA")
    if chosen:
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    # The XDG rules say that a relative path there is to be ignored.
    if base and Path(base).is_absolute():
        return Path(base) / "lockstep" / "data"
    try:
        return Path.home() / ".cache" / "lockstep" / "data"
    except RuntimeError:
        raise InputError("this user has no home folder to keep data in: set LOCKSTEP_DATA to a folder") from None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time. The system releases the lock when its holder ends, in whatever way."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
