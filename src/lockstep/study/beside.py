"""The check of a race: a few whole trainings, each with windows of the same steps right before and right after it.

A machine may be a third faster ten minutes after the race, and then no training takes as long as the race said. What is checked is that a
training is its steps and its evaluations and nothing else, so the steps are taken when the training is: by another start of the same
cell, which is parked while the training goes on.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.errors import InputError
from lockstep.machine import starving
from lockstep.machine.cpu import TICKS_S, ticks
from lockstep.rounds import multiple
from lockstep.run import Options
from lockstep.shapes import BesideTurns, Spent
from lockstep.study.plan import Cell
from lockstep.turns import ContenderFailed, Ranks
from lockstep.turns.contender import Taken
from lockstep.turns.estimate import middle_mean

CHECKED = 3
"""The first N trainings of a study are checked."""
# The length of a window, and for how long windows are taken before and after each training.
WINDOW_S, SECONDS = 0.1, 3.0
WARM_STEPS = 20


class Beside:
    """One start of a cell, and what its steps take."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._starved = ranks, False
        ranks.start(1)
        ranks.ready()
        self._step = self._warm()
        self._before = self._cost()
        self._evaluation = ranks.look().evaluation

    def found(self) -> BesideTurns | None:
        """Once the training is over; None where its ranks have gone meanwhile, had not their cores, or do not tell how long an evaluation takes."""
        if self._evaluation is None:
            return None
        try:
            self._warm()
            after = self._cost()
        except ContenderFailed:
            return None
        return None if self._starved else {"before": self._before, "after": after, "evaluation": self._evaluation}

    def _warm(self) -> float:
        """Steps after a pause are slow. Returns what one of them takes in the end."""
        step = self._ranks.take(1, 1).wall
        steps = multiple(max(1, min(WARM_STEPS, round(SECONDS / step))), self._ranks.whole_steps)
        return self._ranks.take(steps, steps).wall / steps

    def _cost(self) -> float:
        """Seconds for an image."""
        together = self._ranks.whole_steps
        steps, until = multiple(max(1, round(WINDOW_S / self._step)), together), time.monotonic() + SECONDS
        windows, before = list[Taken](), ticks()
        while not windows or time.monotonic() < until:
            windows.append(self._ranks.take(together, steps))
        after, used = ticks(), sum(window.used for window in windows)
        spent = Spent(
            used=used,
            waited=sum(window.waited or 0.0 for window in windows),
            others=(after.busy - before.busy) / TICKS_S - used,
            stolen=(after.stolen - before.stolen) / TICKS_S,
        )
        self._starved |= starving.starved(starving.had(spent))
        return middle_mean([window.wall / window.samples for window in windows])


@contextmanager
def beside(cell: Cell, folder: Path, options: Options) -> Iterator[Beside | None]:
    """A start of this cell that is parked; None where it does not start, as the training itself will say."""
    ranks = Ranks(cell.name, cell.recipe, cell.placement, folder, options)
    try:
        try:
            parked: Beside | None = Beside(ranks)
        except (ContenderFailed, InputError):
            parked = None
        yield parked
    finally:
        ranks.end()
        shutil.rmtree(folder, ignore_errors=True)
