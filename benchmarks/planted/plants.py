"""What a loop plants: a cause by name and its size as a share of a step without it.

The size is exact where the loop itself spends the time: it says for how long (`spent`). Where a process beside it takes the processor,
the effect is measured: the loop switches the cause on and off in turns of a few steps (`turns`), and compares.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

DISTURB = Path(__file__).with_name("disturb.py")
TURN_STEPS = 5
EVALUATE_EVERY = 10
# One rank alone has these; the others wait for it.
VICTIM, LOGGER = 1, 0
_current: Plant | None = None


class Plant:
    """One cause in one rank's loop. `pause` where the loop does what the cause slows down; nothing happens for any other place."""

    def __init__(self, cause: str, size: float, step_s: float, rank: int, folder: Path, turns: bool = False) -> None:
        self._cause, self._seconds, self._rank, self._turns = cause, size * step_s, rank, turns
        global _current
        _current = self
        self.spent = 0.0
        self.on: list[bool] = []
        """For each step, whether the cause was there."""
        self._switch = folder / f"switch-{rank}"
        self._helper: subprocess.Popen[bytes] | None = None
        how = {"throttled rank": "stop", "throttled host": "stop", "busy neighbour": "spin"}.get(cause)
        if how and size and rank == VICTIM:
            self._switch.write_text("0")
            # Of the time with the cause, so that work takes `size` longer.
            share = size / (1 + size)
            self._helper = subprocess.Popen(
                [sys.executable, str(DISTURB), how, str(os.getpid()), str(share), str(self._switch)]
            )

    def step(self) -> None:
        """Before each step."""
        there = not self._turns or len(self.on) // TURN_STEPS % 2 == 1
        if self._helper and (not self.on or there != self.on[-1]):
            self._switch.write_text("1" if there else "0")
        self.on.append(there)

    def pause(self, place: str) -> None:
        """Wait as long as the cause takes here."""
        own = {"slow loader": "data", "slow collective": "exchange", "waiting log": "log", "evaluation": "evaluate"}
        if own.get(self._cause) != place or (place == "log" and self._rank != LOGGER) or not self._seconds:
            return
        if self.on and not self.on[-1]:
            return
        begin = time.perf_counter()
        time.sleep(self._seconds * (EVALUATE_EVERY if place == "evaluate" else 1))
        self.spent += time.perf_counter() - begin

    @property
    def evaluates(self) -> bool:
        """Whether an evaluation is due after this step."""
        return self._cause == "evaluation" and len(self.on) % EVALUATE_EVERY == 0

    def close(self) -> None:
        if self._helper:
            self._switch.write_text("x")
            self._helper.wait()


def current() -> Plant:
    """The one of this process, for what the loop does not call itself."""
    assert _current is not None
    return _current
