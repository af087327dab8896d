"""The folder where Lockstep keeps what it finds out and fetches."""

from __future__ import annotations

import os
from pathlib import Path

from lockstep.errors import InputError
from lockstep.files import home_path


def cache_folder() -> Path:
    """LOCKSTEP_DATA, else $XDG_CACHE_HOME/lockstep/data, else ~/.cache/lockstep/data."""
    chosen = os.environ.get("LOCKSTEP_DATA")
    if chosen:
        return home_path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    # The XDG rules say that a relative path there is to be ignored.
    if base and Path(base).is_absolute():
        return Path(base) / "lockstep" / "data"
    try:
        return Path.home() / ".cache" / "lockstep" / "data"
    except RuntimeError:
        raise InputError("this user has no home folder to keep data in: set LOCKSTEP_DATA to a folder") from None
