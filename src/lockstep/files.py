"""Files that several processes share: replaced in one step, and guarded by locks that a killed holder cannot keep.

The lock is `flock` and not the package filelock. Where a file system has no `flock`, filelock falls back to a file that a killed holder leaves
behind, and it does not say who holds a lock; what remains of it is the loop below.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
TEMPORARY = ".tmp-*"
"""Matches the names of unfinished files. A killed writer leaves one behind, and nothing reads it."""
QUIET_SECONDS = 2.0
"""How long to wait for a lock before saying what we wait for."""
_POLL_SECONDS = 0.05


@contextmanager
def replacing(path: Path, durable: bool = True) -> Iterator[Path]:
    """A temporary path to write to, which takes the place of `path` when the block ends well and is removed when it does not.

    A reader sees the old file or the new one, never a part. `durable` waits for the disk first, so that this holds after a power failure
    too. The temporary name ends as `path` does, because some writers choose the format by the ending.
    """
    temporary = path.with_name(f".tmp-{os.urandom(4).hex()}-{path.name}")
    try:
        yield temporary
        if durable:
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def write_atomically(path: Path, data: bytes, durable: bool = True) -> None:
    """Replace the file's content in one step."""
    with replacing(path, durable) as temporary:
        temporary.write_bytes(data)


class Held(Exception):
    """Another process holds the lock."""

    def __init__(self, holder: str) -> None:
        super().__init__(f"process {holder}")
        self.holder = holder
        """Its process id, as text; "unknown" where the file does not say."""


def to_stderr(text: str) -> None:
    print(f"lockstep: {text}", file=sys.stderr, flush=True)


@contextmanager
def locked(
    path: Path, purpose: str, say: Callable[[str], None] = to_stderr, wait: bool = True, patience: float = QUIET_SECONDS
) -> Iterator[None]:
    """Hold a lock file. It excludes other processes and other threads, and the kernel releases it when its holder ends, in whatever way.

    `purpose` completes the sentence "waiting for another process that is …", which is said once after `patience` seconds. Without `wait` a
    lock that is taken raises `Held`. The file stays: removing it would give two waiters two different files to lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Closed on exec (Python's default): a program that we start must not keep the lock if we are killed.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if not _try(descriptor, path):
            if not wait:
                raise Held(os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown")
            _wait(descriptor, path, purpose, say, patience)
        with suppress(OSError):  # only for the message of `Held`: a full disk does not matter
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        try:
            yield
        finally:
            # Closing is not enough: a forked child has the same lock through its copy of the descriptor.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def find_once(
    path: Path, purpose: str, read: Callable[[], T | None], find: Callable[[], T], write: Callable[[T], None]
) -> T:
    """What is kept in a file, or found out now. Of several processes one finds out and writes, and the others wait for it.

    Where the folder cannot be written, each process finds out for itself.
    """
    known = read()
    if known is not None:
        return known
    try:
        with locked(path.with_suffix(".lock"), purpose):
            known = read()
            if known is None:
                known = find()
                write(known)
            return known
    except OSError:
        return find() if known is None else known


def _try(descriptor: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # flock knows no path, and without one the message would be of no use
        raise OSError(error.errno, f"cannot be locked: {error.strerror}", str(path)) from None
    return True


def _wait(descriptor: int, path: Path, purpose: str, say: Callable[[str], None], patience: float) -> None:
    begin, said = time.monotonic(), False
    while not _try(descriptor, path):
        if not said and time.monotonic() - begin >= patience:
            say(f"waiting for another process that is {purpose}")
            said = True
        time.sleep(_POLL_SECONDS)


def home_path(text: str | Path) -> Path:
    """A path that a person wrote, absolute. `~` is the home folder; `~nobody` stays as it is, where Path.expanduser raises."""
    return Path(os.path.expanduser(text)).absolute()  # noqa: PTH111
