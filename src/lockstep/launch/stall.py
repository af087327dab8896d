"""Noticing a rank that is stopped: its signs of life no longer change, though its process is still there.

A rank reports from a thread of its own twice a second, so silence means that the whole process stands still: a SIGSTOP, a
debugger, a machine that swaps. A rank that hangs in its own code goes on reporting; there the others' timeout ends the run,
and the cause names the one that was not waiting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.process import stat_fields
from lockstep.run import Spec

# Six signs of life that did not come. On a busy machine a few are late, and no timeout is so short that this would say more.
LEAST_PATIENCE_S = 3.0
LEAST_LOOKS = 4
Beat = Mapping[str, Any]
"""A rank's last sign of life (Run.rank_statuses)."""


class Stalled(Exception):
    """A rank gave no sign of life for too long, or the ranks cannot go on (launch/hang.py). `rank`: None where none can be named."""

    def __init__(self, rank: int | None, cause: str) -> None:
        super().__init__(cause)
        self.rank, self.cause = rank, cause
        self.named = {} if rank is None else {"rank": rank}
        """For the run's status."""


class StallWatch:
    """Compares each rank's last sign of life with the one before; clocks of other hosts do not matter."""

    def __init__(self, spec: Spec, every_s: float = 0.0) -> None:
        """`every_s`: how often it is asked."""
        # Half of what the others would wait, so that the stopped rank is named before they give up; and several looks.
        self._patience_s = max(LEAST_PATIENCE_S, spec.placement.timeout_s / 2, LEAST_LOOKS * every_s)
        self._seen: dict[int, tuple[float, float]] = {}
        self._checked: float | None = None

    def check(self, now: float, beats: Sequence[Beat]) -> None:
        """Raise Stalled for the rank that has been silent longest, if that is too long. `beats`: every rank's last sign of life."""
        self._forgive(now)
        for beat in beats:
            rank, time = int(beat["rank"]), float(beat["time"])
            if beat["state"] != "running":
                self._seen.pop(rank, None)
            elif self._seen.get(rank, (0.0, 0.0))[0] != time:
                self._seen[rank] = (time, now)
        silent = {rank: now - since for rank, (_, since) in self._seen.items() if now - since > self._patience_s}
        if silent:
            rank = max(silent, key=lambda r: silent[r])
            pid = next(beat["pid"] for beat in beats if beat["rank"] == rank)
            state = " (its process is stopped)" if _is_stopped(int(pid)) else ""
            raise Stalled(rank, f"rank {rank} gave no sign of life for {silent[rank]:.0f} s{state}")

    def _forgive(self, now: float) -> None:
        """Time in which the watch itself stood still counts for nobody: all were stopped together (Ctrl-Z, a frozen container), and
        whoever wakes first would blame the others."""
        gap = 0.0 if self._checked is None else now - self._checked
        self._checked = now
        if gap > self._patience_s / 2:
            self._seen = {rank: (time, since + gap) for rank, (time, since) in self._seen.items()}


def _is_stopped(pid: int) -> bool:
    return stat_fields(pid)[:1] in (["T"], ["t"])
