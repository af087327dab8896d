"""One process prepares a data set, the others wait: a lock, and a folder that a kill cannot poison."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from lockstep.data.voice import Voice
from lockstep.errors import InputError

SAY_AFTER = 2.0  # seconds of waiting before we say what we wait for
_POLL = 0.05


@contextlib.contextmanager
def hold(lock: Path, voice: Voice, what: str) -> Iterator[None]:
    """Hold the lock file. The kernel lets go of it when the holder ends, in whatever way."""
    # O_CLOEXEC (Python's default): a package manager that we start must not keep the lock if we are killed.
    handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _wait(handle, lock, voice, what)
        yield
    finally:
        os.close(handle)


def _wait(handle: int, lock: Path, voice: Voice, what: str) -> None:
    started = time.monotonic()
    said = False
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR):
                raise InputError(
                    f"{lock} cannot be locked ({error.strerror}): set LOCKSTEP_DATA to a local folder"
                ) from None
        if not said and time.monotonic() - started >= SAY_AFTER:
            voice.note(f"waiting for another process that is preparing {what}")
            said = True
        time.sleep(_POLL)


@contextlib.contextmanager
def working_folder(parent: Path) -> Iterator[Path]:
    """An empty folder below `parent`, gone afterwards. Only for the holder of the lock that guards `parent`.

    Whatever is found in `parent` was left by a holder that was killed: only one holder exists at a time,
    and it is us.
    """
    shutil.rmtree(parent, ignore_errors=True)
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(parent, ignore_errors=True)


def set_aside(path: Path) -> Path:
    """Rename a bad file to `*.corrupt` (numbered where that is taken), so that it is kept but never used."""
    target = path.with_name(path.name + ".corrupt")
    number = 1
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}.corrupt.{number}")
    path.rename(target)
    return target
