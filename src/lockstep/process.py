"""What a process does first: end with its parent, keep its output, stay on its cores, import torch. And how its allocator is set."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

PARENT = "LOCKSTEP_PARENT_PID"
CORES = "LOCKSTEP_CORES"
"""The cores of all ranks of this host, in their order: "2,3"; or "any:0,1,2,3" where they are not to be pinned (launch/cores.py)."""
LINK = "LOCKSTEP_LINK_PID"
"""The process that carries packets between emulated hosts, where one does: it works for the ranks, though none of them started it."""
_PR_SET_PDEATHSIG = 1

# glibc gives large blocks back to the system at every free and faults them in again at every allocation. Keeping
# them made a step at batch 128 1.4x faster (docs/training.md). Only where the user has not chosen otherwise.
KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(256 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}


def die_with_parent(parent: int | None = None, sign: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to end us when our parent ends, so that a killed launcher leaves no rank behind (Linux).

    `parent` is who that is meant to be; by default, whoever our launcher said. It outlives exec.
    """
    if not sys.platform.startswith("linux"):
        return
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, sign, 0, 0, 0)
    # The parent may have ended before we asked; then somebody else is our parent by now.
    stated = os.environ.get(PARENT)
    expected = parent if parent is not None else int(stated) if stated is not None else None
    if expected is not None and os.getppid() != expected:
        os._exit(128 + signal.SIGTERM)


def stat_fields(pid: int) -> list[str]:
    """What the system says of a process: the fields of /proc/PID/stat after its name, which may hold anything; empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def redirect_output(path: Path) -> None:
    """Send this process's output, and that of the libraries in it, to a file of its own."""
    with suppress(OSError), path.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def pin(local_rank: int, local_world: int, threads: int) -> bool:
    """Keep this rank on cores of its own; with more ranks than free cores there are none, and the system decides."""
    if not hasattr(os, "sched_setaffinity"):
        return False
    text = os.environ.get(CORES, "")
    listed = [int(core) for core in text.removeprefix("any:").split(",") if core]
    if text.startswith("any:"):
        # A launcher that binds ranks by itself may have put them where another run is.
        with suppress(OSError):
            os.sched_setaffinity(0, listed)
        return False
    usable = listed or sorted(os.sched_getaffinity(0))
    if local_world * threads > len(usable):
        return False
    with suppress(OSError):
        os.sched_setaffinity(0, usable[local_rank * threads : (local_rank + 1) * threads])
        return True
    return False


def import_torch() -> None:
    """Import torch without looking for garbage on the way: all that an import makes stays.

    So the collector need not look through it later either, when a rank leaves its group.
    """
    gc.disable()
    import torch  # noqa: F401

    gc.freeze()
    gc.enable()


def end_now(code: int) -> NoReturn:
    """End without taking torch apart, which takes 0.5 to 2 s. What others have asked to do at the end (MPI says goodbye) is done."""
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
