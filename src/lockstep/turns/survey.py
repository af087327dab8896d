"""Rounds without a question: all contenders take as many windows as there is time for, and whoever reads them knows what for."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Sequence

from lockstep.turns.contender import Contender
from lockstep.turns.estimate import Ratio, Window
from lockstep.turns.race import Budget, Length, Race

FEWEST_ROUNDS = 4


class Survey(Race):
    """As many starts of everyone as asked for. `fixed`: contenders whose window is what it is (a whole round of a probe, say), and need no warming up."""

    def __init__(
        self,
        contenders: Sequence[Contender],
        seconds: float,
        rounds: int,
        starts: int = 1,
        fixed: Collection[str] = (),
        changed: Callable[[Race], None] = lambda race: None,
    ) -> None:
        """`seconds` and `rounds` are those of one start."""
        super().__init__(contenders, Budget(seconds=seconds), changed=changed, lenient=True)
        self._fixed, self._wanted, self._starts = fixed, rounds, starts

    def run(self) -> list[Ratio]:
        """All rounds, or as many as the time allows once everyone has started; contenders that fail are left out."""
        for _ in range(self._starts):
            self._one_start()
        return []

    def _go_round(self) -> None:
        begun = time.monotonic()
        for number in range(1, self._wanted + 1):
            taken = statistics.median(self._round_s or [0.0])
            if number > FEWEST_ROUNDS and time.monotonic() - begun + taken > self.budget.seconds:
                break
            start = time.monotonic()
            self.windows += self._round(self._racing(), number)
            self._round_s.append(time.monotonic() - start)
            self._changed(self)

    def of(self, name: str) -> list[Window]:
        return [window for window in self.windows if window.contender == name]

    def _racing(self) -> list[Contender]:
        return [contender for contender in self.contenders if contender.name not in self.failures]

    def _calibrate(self, contender: Contender) -> None:
        if contender.name in self._fixed:
            self._lengths[contender.name] = Length(0, 1)
        else:
            super()._calibrate(contender)
