"""What every launcher has in common: the command of a worker, and the environment of a rank."""

from __future__ import annotations

import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.machine.facts import rank_environment
from lockstep.placement import Placement, elsewhere
from lockstep.process import KEEP_MEMORY


@dataclass(frozen=True)
class Start:
    """One process to start: a rank, or an agent that starts several."""

    argv: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    """Set over what is inherited."""
    defaults: dict[str, str] = field(default_factory=dict)
    """Set only where the user has not."""
    rank: int | None = None
    what: str = "the launcher"
    """What it is called where it is no rank itself."""
    ends_within_s: float = 2.0
    """How long it may take to end what it started, before it is killed."""

    def words(self) -> list[str]:
        """The whole command, environment included, as it can be typed into a shell."""
        return ["env", *(f"{name}={value}" for name, value in self.environment.items()), *self.argv]


@dataclass
class Watched:
    """A process that was started."""

    process: subprocess.Popen[bytes]
    start: Start
    ended: float | None = None
    """When it was seen to have ended by itself, by the clock that failure reports use; None where we ended it."""


def worker_argv(folder: Path) -> list[str]:
    return [sys.executable, "-m", "lockstep.worker", str(folder)]


def monitor_argv(folder: Path) -> list[str]:
    """A worker with a monitor beside it (launch/monitor.py), for launchers that do not tell how a rank ended."""
    return [sys.executable, "-m", "lockstep.launch.monitor", str(folder)]


def thread_environment(placement: Placement) -> dict[str, str]:
    """Threads are the placement's to decide, so these are set even where the user's shell says otherwise."""
    threads = str(placement.threads)
    return {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}


def default_environment(placement: Placement) -> dict[str, str]:
    defaults = dict(KEEP_MEMORY)
    # On a cluster the machine that submits need not be one that trains.
    if placement.device == "cpu" and not elsewhere(placement):
        defaults |= rank_environment()
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if placement.hosts == 1 and loopback:
        # Ranks of one host talk over loopback: no other machine can connect, whatever the host's name resolves to.
        defaults |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    return defaults
