"""When a child process is given up: by what it does, not by the clock alone, since a busy machine makes everything late.

A process that computes without end uses processor time; one that waits for a message which never comes uses none, and does not
ask for any. One that asks for a processor and gets none, since others have it, is neither: the machine is busy, and that decides nothing.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path

from lockstep.machine.cpu import TICKS_S, ticks
from lockstep.turns.guard import descendants

Ended = str
"""How a child ended: "over" by itself, "killed" by the system or by somebody else, "starved" by us because the machine is too busy, else what it
did when we ended it."""


@dataclass(frozen=True)
class Patience:
    """For one child with all the processes that it starts."""

    cpu_s: float = 150.0
    """Processor seconds that it may use."""
    quiet_s: float = 90.0
    """Give up after N seconds in which it neither runs nor asks for a processor."""
    own_s: float = inf
    """Seconds that it may take, without those in which it asks for a processor that others have."""
    wall_s: float = 1200.0
    """However busy the machine is."""


# Threads that only poll use up to this share of a processor.
QUIET = 0.05


class Watch:
    """Looks at all processes below one, again and again."""

    def __init__(self, root: int, patience: Patience) -> None:
        self._root, self._patience = root, patience
        self._begun = self._looked = time.monotonic()
        self._used = self._delayed = 0.0
        self._machine_s = _machine_s()
        self.own_s = 0.0
        """What it has taken so far, without the time in which its threads waited for a processor that others had."""
        self._threads: dict[str, tuple[float, float]] = {}
        self._seen: deque[tuple[float, float]] = deque()

    def look(self) -> Ended:
        """Why it has to be ended now; "" where it may go on."""
        now, patience = time.monotonic(), self._patience
        self._count()
        used = sum(cpu for cpu, _ in self._threads.values())
        delayed = sum(waited for _, waited in self._threads.values())
        active = used + delayed
        machine_s = _machine_s()
        passed, ran = now - self._looked, used - self._used
        # Threads that wait behind others of their own did not wait for the machine (machine/starving.py).
        lost = max(0.0, min(delayed - self._delayed, machine_s - self._machine_s - ran))
        # Where several wait at the same time, less is lost than all their waiting: the share that they did not get.
        self.own_s += max(passed - lost, passed * ran / (ran + lost)) if lost else passed
        self._looked, self._used, self._delayed, self._machine_s = now, used, delayed, machine_s
        self._seen.append((now, active))
        while now - self._seen[0][0] > patience.quiet_s:
            before, then = self._seen.popleft()
            if active - then < QUIET * (now - before):
                return f"for {patience.quiet_s:.0f} s it neither computed nor waited for a processor"
        if used > patience.cpu_s:
            return f"it computed for {used:.0f} s without coming to an end"
        if self.own_s > patience.own_s:
            return f"it did not come to an end within {patience.own_s:.0f} s"
        return "starved" if now - self._begun > patience.wall_s else ""

    def _count(self) -> None:
        """Seconds that each thread ran, and could have run; those of threads that have ended stay."""
        for process in descendants(self._root):
            for path in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
                with suppress(OSError, ValueError, IndexError):
                    ran, waited = path.read_text().split()[:2]
                    self._threads[f"{process.pid}/{path.parent.name}"] = int(ran) / 1e9, int(waited) / 1e9


def _machine_s() -> float:
    """Processor seconds of all that runs here, and of what the hypervisor gave to other machines."""
    machine = ticks()
    return (machine.busy + machine.stolen) / TICKS_S
