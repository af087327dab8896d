"""Leaving before the end, all ranks after the same step: a time limit, or a cluster that wants its nodes back.

Ranks ask each other about twice a second. No rank can decide alone: the others would wait for it in their next exchange.
It imports no torch by itself: the monitor beside a rank needs it too (launch/monitor.py).
"""

from __future__ import annotations

import signal
import time
from typing import Any

# About how long between two votes, and how many steps at most.
VOTE_S, MOST_STEPS = 0.5, 20
# Slurm sends the first when it ends a job or wants its nodes for another one, the second ahead of the job's time limit.
ASKING = (signal.SIGTERM, signal.SIGUSR1)


def hold_back() -> None:
    """Leave what asks us to go pending, for us and the processes that we start: before its first step a rank can only die of it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)


def let_through() -> None:
    """Take what was held back, and what comes from now on."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)


class Leave(Exception):
    """The checkpoint is written, and the run goes on later, in other processes."""


class Votes:
    """Whether all ranks stop here."""

    def __init__(self, step: int, limit_s: float | None, gives_way: bool) -> None:
        self.asked = False
        """Whether any rank was asked to give way, as of the last vote."""
        self.limit_is_over = False
        self._limit_s, self._needed = limit_s, limit_s is not None or gives_way
        self._began, self._at, self._next, self._heard = time.monotonic(), step, step + 1, False
        self._since = self._began
        if gives_way:
            for number in ASKING:
                signal.signal(number, self._hear)
            let_through()

    def _hear(self, number: int, frame: Any) -> None:
        self._heard = True

    def stop(self, step: int) -> bool:
        """After a step: whether to stop. Collective, but not after every step."""
        from lockstep.backends.group import reduce_max

        if not self._needed or step < self._next:
            return False
        now = time.monotonic()
        over = self._limit_s is not None and now - self._began > self._limit_s
        seconds = (now - self._since) / (step - self._at)
        late, asked, slowest = reduce_max([float(over), float(self._heard), seconds])
        self.limit_is_over, self.asked = bool(late), bool(asked)
        # The slowest rank's time is known to all, so all vote next after the same step.
        self._since, self._at, self._next = now, step, step + max(1, min(MOST_STEPS, int(VOTE_S / max(slowest, 1e-9))))
        return self.limit_is_over or self.asked
