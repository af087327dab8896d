"""Stop a run as Ctrl-C would: signal its supervisor, once it is certain that this process is the supervisor.

A recorded pid may have been reused. So the process is first held by a descriptor (the pid of a held process cannot be
reused), then checked, then signalled.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import InputError
from lockstep.process import stat_fields
from lockstep.run import Run

PROC = Path("/proc")
# The clocks of processes and of files may differ slightly.
CLOCKS_S = 2.0


class CannotStop(Exception):
    """Why this run is not stopped from here, and what to do instead."""


@dataclass(frozen=True)
class Watcher:
    pid: int
    study: bool
    """It runs a study, which stops with this run."""


def watcher(run: Run) -> Watcher:
    """The checked supervisor of the run; raises CannotStop otherwise."""
    status = run.status()
    if status["state"] not in ("starting", "running"):
        raise CannotStop(f"it is not under way: {status['state']}")
    if status.get("job"):
        raise CannotStop(f"it is Slurm job {status['job']}: stop it with 'scancel {status['job']}'")
    pid, host = status.get("supervisor_pid"), status.get("host")
    if not isinstance(pid, int) or not host:
        raise CannotStop("its folder does not say which process watches it")
    if host != os.uname().nodename:
        raise CannotStop(f"it is watched on host {host}: stop it there")
    if not PROC.joinpath("self/stat").exists():
        raise CannotStop("stopping from here needs Linux: press Ctrl-C where it was started")
    words = _words(pid)
    if not _is_of(run, pid):
        raise CannotStop(f"process {pid} is not the one that started this run")
    if not _catches(pid, signal.SIGTERM):
        raise CannotStop(f"process {pid} does not listen for a request to stop: stop it where it was started")
    return Watcher(pid, "study" in words[:4])


def stop(run: Run) -> Watcher:
    """Signal it. It ends the ranks in order, keeps what was measured, and writes 'cancelled'."""
    pid = run.recorded_status().get("supervisor_pid")
    with _held(pid) as handle:
        found = watcher(run)
        if handle is None or found.pid != pid:
            raise CannotStop("the process that watches it has just changed: try again")
        try:
            signal.pidfd_send_signal(handle, signal.SIGTERM)
        except PermissionError:
            raise CannotStop(f"process {pid} belongs to another user") from None
        except ProcessLookupError:
            raise CannotStop("it has just ended") from None
    return found


@contextmanager
def _held(pid: object) -> Iterator[int | None]:
    handle = None
    if isinstance(pid, int) and pid > 0 and hasattr(os, "pidfd_open"):
        with suppress(OSError):
            handle = os.pidfd_open(pid)
    try:
        yield handle
    finally:
        if handle is not None:
            os.close(handle)


def _is_of(run: Run, pid: int) -> bool:
    """It is older than the run that it planned, and a process that it started names the run's folder."""
    try:
        created = run.spec().created
    except InputError:
        return False
    started = _started(pid)
    if started is None or started > created + CLOCKS_S:
        return False
    folder = run.folder.resolve()
    words = [word for child in _children(pid) for word in _words(child) if word.endswith(run.id)]
    return any(Path(word).resolve() == folder for word in words)


def _started(pid: int) -> float | None:
    fields = stat_fields(pid)
    if len(fields) < 20:
        return None
    up = float((PROC / "uptime").read_text().split()[0])
    return time.time() - up + int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _children(pid: int) -> list[int]:
    every = [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()]
    return [each for each in every if (fields := stat_fields(each)) and fields[1] == str(pid)]


def _words(pid: int) -> list[str]:
    try:
        return (PROC / str(pid) / "cmdline").read_bytes().decode(errors="surrogateescape").split("\0")
    except OSError:
        return []


def _catches(pid: int, number: signal.Signals) -> bool:
    """Whether it has a handler: without one, the signal would end whatever else the process does (a notebook, a server)."""
    try:
        lines = (PROC / str(pid) / "status").read_text(errors="replace").splitlines()
    except OSError:
        return False
    mask = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(mask >> (number - 1) & 1)
