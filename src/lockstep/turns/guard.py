"""Keeps a foreign program on a leash: `python guard.py PROGRAM ARGUMENT…` runs it, and leaves nothing of it behind.

Processes that the program starts, and that outlive it, become children of the guard, so they are found wherever they went. When the race
ends, or is killed, the guard ends them all; processes that are frozen end too.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.errors import InputError
from lockstep.inside import site
from lockstep.process import PARENT, die_with_parent, stat_fields

PROC = Path("/proc")
TICKS_S = os.sysconf("SC_CLK_TCK")
_PR_SET_CHILD_SUBREAPER = 36
NOT_STARTED = 127
GONE_S = 2.0


class Process(NamedTuple):
    pid: int
    parent: int
    cpu: float
    """Seconds, those of children that have ended included."""


def check(command: str, program: str) -> None:
    """That there is such a program, said before any work."""
    if shutil.which(program, path=_path()) is None:
        raise InputError(f"{command}: cannot start '{program}': there is no such program; write the command after '--'")


def environment() -> dict[str, str]:
    """What a guard and its program are started with."""
    return {**os.environ, "PATH": _path(), PARENT: str(os.getpid())}


def hooked(variable: str, folder: Path) -> dict[str, str]:
    """The same for a program whose Python processes are to have our hooks: a folder of ours comes first on PYTHONPATH, and `variable` says
    where they write (inside/site/sitecustomize.py)."""
    users = os.environ.get("PYTHONPATH", "")
    paths = [str(Path(site.__file__).parent), *([users] if users else [])]
    return {**environment(), variable: str(folder), "PYTHONPATH": os.pathsep.join(paths)}


def _path() -> str:
    """The user's, and behind it the folder of our own Python: torchrun is beside `.venv/bin/lockstep`, also where nothing is activated."""
    users, ours = os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)
    return f"{users}{os.pathsep}{ours}" if users else ours


def descendants(root: int) -> list[Process]:
    """The processes below `root`, as the system lists them now."""
    found: dict[int, list[Process]] = {}
    for entry in PROC.iterdir():
        if not entry.name.isdigit():
            continue
        fields = stat_fields(int(entry.name))
        if fields:  # else it has ended meanwhile
            used = sum(map(int, fields[11:15])) / TICKS_S
            found.setdefault(int(fields[1]), []).append(Process(int(entry.name), int(fields[1]), used))
    below, queue = [], [root]
    while queue:
        children = found.get(queue.pop(), [])
        below += children
        queue += [child.pid for child in children]
    return below


def send(root: int, sign: signal.Signals) -> None:
    """To all below `root`; again, until nobody is new: a process may have started another meanwhile."""
    seen: set[int] = set()
    while new := [process.pid for process in descendants(root) if process.pid not in seen]:
        for pid in new:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, sign)
        seen.update(new)


def end(process: subprocess.Popen[bytes], limit_s: float) -> None:
    """End a guard with all below it. One that has not done so within the limit is ended itself, after those below it: none of them is left."""
    process.terminate()
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        send(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()


def _end_all() -> None:
    """End all below the guard. Returns when they are gone: one that is only about to die still holds its files and its memory. Those that
    cannot be ended (another user's, a dead file server's) are not waited for longer than that."""
    send(os.getpid(), signal.SIGKILL)
    until = time.monotonic() + GONE_S
    with suppress(ChildProcessError):  # orphans are the guard's own children, so it waits for whoever there was
        while time.monotonic() < until:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.002)


def main() -> None:
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def leave(number: int, frame: Any) -> None:
        _end_all()
        os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, leave)
    die_with_parent(sign=signal.SIGTERM)
    try:
        program = subprocess.Popen(sys.argv[1:])
    except OSError as error:
        print(f"cannot start {sys.argv[1]}: {error.strerror}", file=sys.stderr)
        sys.exit(NOT_STARTED)
    code = program.wait()
    _end_all()
    time.sleep(0.01)  # what it printed last is read before the end is seen
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
