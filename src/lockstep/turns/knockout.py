"""A race in which whoever cannot win any more is out, so that the time goes to those who can.

A race settles each comparison; here only the best is asked for, and those near it need not be told apart. So one start may be enough to see that a
contender loses clearly, and nobody is started more than a few times.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from lockstep.turns import estimate
from lockstep.turns.contender import Contender
from lockstep.turns.estimate import Window
from lockstep.turns.race import Budget, Race

# How much the ratio of two contenders varies from start to start (tests/noise: the median over pairs is 2.5 %): few starts cannot tell it themselves.
START_SPREAD = 0.025
# Standard errors that make a loss clear.
CLEAR = 2.0
FEWEST_ROUNDS, MOST_STARTS = 4, 4


class Standing(NamedTuple):
    """What a contender costs, as a multiple of another one's cost."""

    name: str
    ratio: float
    low: float
    high: float
    starts: int


class Knockout(Race):
    """`weights`: what a second of each costs, where that differs."""

    def __init__(
        self,
        contenders: Sequence[Contender],
        budget: Budget,
        keep: Callable[[Sequence[Window]], None] = lambda windows: None,
        changed: Callable[[Knockout], None] = lambda race: None,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(contenders, budget, keep, self._after_round, lenient=True)
        self._told, self._weights = changed, weights or {}
        self.out: list[str] = []

    def run(self) -> list[estimate.Ratio]:
        """Until one is left, all that are left were started often enough, or the budget is spent."""
        while not self._over():
            self._one_start()
            self._knock_out(1)
        return self.ratios()

    def _racing(self) -> list[Contender]:
        gone = {*self.failures, *self.out}
        return [contender for contender in self.contenders if contender.name not in gone]

    def _over(self) -> bool:
        return len(self._racing()) < 2 or self.starts >= MOST_STARTS or not self._has_time_for(FEWEST_ROUNDS)

    def _after_round(self, race: Race) -> None:
        self._knock_out(FEWEST_ROUNDS)
        self._told(self)

    def _knock_out(self, rounds: int) -> None:
        """Whoever is clearly slower than the best, every so many rounds."""
        if not self.windows or len(self._round_s) % rounds:
            return
        racing = {contender.name for contender in self._racing()}
        limit = 1 + self.budget.margin
        self.out += [each.name for each in self.standings() if each.name in racing and each.low > limit]

    def standings(self) -> list[Standing]:
        """Whoever took windows, the best first."""
        names = list(dict.fromkeys(window.contender for window in self.windows))
        names = [name for name in names if name not in self.failures]
        if not names:
            return []
        # Those in the race were in the same rounds, so their ratios to any one of them give the order. Then each is compared with the best, in
        # the rounds that both were in.
        in_race = [name for name in names if name not in self.out] or names
        best = min(in_race, key=lambda name: self._shift(name, in_race[0])[0])
        found = [self.compare(name, best) for name in names]
        return sorted(found, key=lambda each: (each.name != best, each.ratio))

    def compare(self, name: str, other: str) -> Standing:
        """What a contender costs, as a multiple of another one's cost."""
        shift, error, starts = self._shift(name, other)
        reach = CLEAR * error
        return Standing(name, math.exp(shift), math.exp(shift - reach), math.exp(shift + reach), starts)

    def _shift(self, name: str, other: str) -> tuple[float, float, int]:
        """The log of a ratio of costs, its standard error, and the number of starts."""
        weight = math.log(self._weights.get(name, 1.0) / self._weights.get(other, 1.0))
        by_start = estimate.by_start(self.windows, name, other)
        if name == other:
            return 0.0, 0.0, len(by_start)
        if not by_start:  # they were never in one round
            return weight, math.inf, 0
        means = [estimate.middle_mean(rounds) for rounds in by_start]
        rounds = [rounds for rounds in by_start if len(rounds) > 1]
        noise = statistics.fmean(statistics.variance(each) / len(each) for each in rounds) if rounds else 0.0
        # Two starts may be alike by chance, and some machines differ more than most.
        spread = max(START_SPREAD, statistics.stdev(means)) if len(means) > 1 else START_SPREAD
        return weight + statistics.fmean(means), math.sqrt((spread**2 + noise) / len(means)), len(means)
