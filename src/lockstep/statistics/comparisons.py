"""Cells against a baseline, pair by pair, a family at a time: how large a difference is, and what can be said of it."""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from lockstep.metrics import Kind
from lockstep.statistics.intervals import t_p, t_quantile
from lockstep.statistics.permutation import EXACT_UP_TO, permutation_interval, permutation_p, rank_differences
from lockstep.statistics.pooled import Spread

ALPHA = 0.05
"""The family-wise error rate: how often a family of comparisons in which nothing differs may have a verdict."""
# The equivalence margin, a difference that nobody would act on: 2 % of a time or of a loss, half a point of accuracy.
MARGIN_RATIO = 0.02
MARGIN_DIFFERENCE = 0.005
MOST_PAIRS = 1000
# The machine's speed is smoothed over N neighbouring pairs before runs are ranked together.
DRIFT_WINDOW = 5
# A time that was not reached is longer than any other. On the scale of logs this is beyond every time; ranks do not care how far.
NEVER = 1000.0
# With fewer pairs than this, the spread of all cells counts beside that of the pairs themselves.
ENOUGH_PAIRS = 4

Values = Sequence[float]
Verdict = Literal["faster", "slower", "better", "worse", "higher", "lower", "the same", "not significant", "too few"]
# What a larger value is called, and a smaller one.
WORDS: dict[Kind, tuple[Verdict, Verdict]] = {
    "time": ("slower", "faster"),
    "rate": ("faster", "slower"),
    "accuracy": ("better", "worse"),
    "loss": ("worse", "better"),
    "size": ("higher", "lower"),
    "measure": ("higher", "lower"),
}


@dataclass(frozen=True)
class Comparison:
    """One cell against the baseline, pair by pair: a ratio for times, rates, sizes and losses, else a difference."""

    n: int
    effect: float | None
    """Ratio or difference; None where it is infinite, because most runs of one side never got there."""
    low: float | None
    high: float | None
    verdict: Verdict
    more: tuple[int, int] | None
    """How many more pairs would settle it: if the difference is as large as it looks, and whatever it is. None where it is settled, or
    where that cannot be known."""
    how: str
    p: float | None = None
    level: float | None = None
    """Of the interval: what Holm's procedure asks of this one, given the others of its family."""

    @property
    def settled(self) -> bool:
        return self.verdict not in ("not significant", "too few")


def compare(cell: Values, baseline: Values, kind: Kind) -> Comparison:
    """One comparison by itself. Pairs are in the order of time; infinity stands for a time that was not reached."""
    return compare_family([(cell, baseline)], kind)[0]


def compare_family(
    pairs: Sequence[tuple[Values, Values]], kind: Kind, alpha: float = ALPHA, spread: Spread | None = None
) -> list[Comparison]:
    """All comparisons of one metric. Holm: the smallest p-value has to beat alpha / m, the next one alpha / (m - 1), and so on until one fails.

    `spread`: of all cells together (pooled.py), on the scale of the comparison: what two or three pairs are judged by.
    """
    size = sum(len(cell) > 1 for cell, _ in pairs)
    tests = [_PairedTest(cell, baseline, kind, alpha / max(1, size), spread) for cell, baseline in pairs]
    size = sum(test.n > 1 for test in tests)
    p_values = [test.p() if test.n > 1 else 1.0 for test in tests]
    share, failed, compared = alpha, False, 0
    results: dict[int, Comparison] = {}
    for index in sorted(range(len(tests)), key=lambda index: p_values[index]):
        if tests[index].n > 1:
            share = share if failed else alpha / (size - compared)
            failed = failed or p_values[index] > share
            compared += 1
        results[index] = _comparison(tests[index], p_values[index], share, kind)
    return [results[index] for index in range(len(tests))]


class _PairedTest:
    """Two sides that were measured pair by pair, and the test that fits them: exact where there are enough pairs for the strictest level."""

    def __init__(self, cell: Values, baseline: Values, kind: Kind, strictest: float, spread: Spread | None) -> None:
        self.n = len(cell)
        scaled = kind in ("time", "rate", "size")
        self.ratio = kind != "accuracy" and min([*cell, *baseline], default=0.0) > 0
        self.margin = math.log1p(MARGIN_RATIO) if self.ratio else MARGIN_DIFFERENCE
        if kind == "measure" and not self.ratio:  # on a scale of its own, with values below zero
            self.margin = MARGIN_RATIO * statistics.median([abs(value) for value in (*cell, *baseline)] or [0.0])
        a, b = ([math.log(v) if self.ratio else v for v in values] for values in (cell, baseline))
        # Machines drift, so times are compared over pairs near each other. What a seed does to an accuracy it does to both of
        # its pair and to no neighbour: there each pair has a level of its own, which makes this a signed-rank test (with the
        # scores 1, 3, 5, … where Wilcoxon's has 1, 2, 3, …).
        window = DRIFT_WINDOW if scaled else 1
        self.censored = any(math.isinf(value) for value in (*a, *b))
        if self.censored:
            # Two runs that both never got there say nothing about which of them is the slower one.
            known = [(x, y) for x, y in zip(a, b, strict=True) if not (math.isinf(x) and math.isinf(y))]
            self.n, window = len(known), 1
            a, b = [_censored_difference(x, y) for x, y in known], [0.0] * self.n
        self.exact = self.censored or 0.5 ** (self.n - 1) <= strictest
        self.differences = [x - y for x, y in zip(a, b, strict=True)]
        levels = _running_median([(x + y) / 2 for x, y in zip(a, b, strict=True)], window)
        self.a = [value - level for value, level in zip(a, levels, strict=True)]
        self.b = [value - level for value, level in zip(b, levels, strict=True)]
        few = 1 < self.n < ENOUGH_PAIRS and not self.exact
        self.spread = spread if few and spread and spread.deviation and spread.degrees >= self.n else None

    def p(self) -> float:
        """The two-sided p-value of "nothing differs"."""
        if self.exact:
            return permutation_p(rank_differences(self.a, self.b, 0.0))
        deviation, degrees = self._deviation()
        if deviation == 0:
            # Values on a grid (an accuracy over few samples) can agree by chance; t would be certain of it.
            return 0.5 ** (self.n - 1) if self.differences[0] else 1.0
        return t_p(statistics.fmean(self.differences) / deviation * math.sqrt(self.n), degrees)

    def interval(self, alpha: float) -> tuple[float, float, float, str]:
        """The estimated shift, the confidence interval (all shifts that the test does not reject), and which test it was."""
        if self.exact:
            return *permutation_interval(self.a, self.b, alpha), "exact" if self.n <= EXACT_UP_TO else "normal"
        mean, (deviation, degrees) = statistics.fmean(self.differences), self._deviation()
        if deviation == 0:
            return mean, min(0.0, mean), max(0.0, mean), "equal steps"
        half = t_quantile(alpha, degrees) * deviation / math.sqrt(self.n)
        return mean, mean - half, mean + half, "pooled t" if self.spread else "t"

    def _deviation(self) -> tuple[float, int]:
        """Of the differences, with its degrees of freedom. Pairs that differ by more than all cells do are believed, not the cells."""
        own = statistics.stdev(self.differences)
        if self.spread is None:
            return own, self.n - 1
        return max(own, self.spread.of_pairs), self.spread.degrees


def _censored_difference(a: float, b: float) -> float:
    """The difference of two logs, one of which may be infinite."""
    return NEVER if math.isinf(a) else -NEVER if math.isinf(b) else a - b


def _running_median(values: Sequence[float], window: int) -> list[float]:
    half = window // 2
    return [statistics.median(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def _comparison(test: _PairedTest, p: float, alpha: float, kind: Kind) -> Comparison:
    back: Callable[[float], float] = math.exp if test.ratio else float
    if test.n == 0:
        return Comparison(0, None, None, None, "too few", None, "no pair has both")
    if test.n == 1:
        only = None if test.censored else back(test.differences[0])
        return Comparison(1, only, None, None, "too few", None, "one pair says nothing about the spread")
    if test.censored:
        return _censored_comparison(test, p, alpha, kind)
    shift, low, high, how = test.interval(alpha)
    verdict = _verdict(low, high, test.margin, kind)
    more = None
    if verdict == "not significant":
        more = more_pairs(test.n, shift, (high - low) / 2, test.margin, alpha) if test.spread is None else None
    return Comparison(test.n, back(shift), back(low), back(high), verdict, more, how, p, 1 - alpha)


def _censored_comparison(test: _PairedTest, p: float, alpha: float, kind: Kind) -> Comparison:
    """Where a side did not get there in some pairs, ranks tell which is the slower one, and nothing tells by how much at most."""
    larger, smaller = WORDS[kind]
    verdict: Verdict = "not significant"
    if p <= alpha:
        verdict = larger if sum(rank_differences(test.a, test.b, 0.0)) > 0 else smaller
    median = statistics.median(test.differences)
    effect = None if abs(median) > NEVER / 10 else math.exp(median)
    return Comparison(test.n, effect, None, None, verdict, None, "exact", p, 1 - alpha)


def _verdict(low: float, high: float, margin: float, kind: Kind) -> Verdict:
    larger, smaller = WORDS[kind]
    if max(-low, high) <= margin:
        return "the same"
    if low > 0:
        return larger
    return smaller if high < 0 else "not significant"


def more_pairs(n: int, shift: float, half: float, margin: float, alpha: float) -> tuple[int, int] | None:
    """How many more pairs would settle it, if the machine stays as noisy as it was: if the difference is as large as it looks, and whatever it is.

    Half an interval below half the margin settles every case: a difference is then either seen or within the margin. Few pairs say
    little about the noise, so the upper quartile of its standard deviation counts; where that asks for more than MOST_PAIRS, no number is
    honest.
    """
    if n < 3:
        return None
    deviation = half * math.sqrt(n) / t_quantile(alpha, n - 1) * _deviation_quartile(n)
    whatever = _pairs_for(margin / 2, deviation, alpha)
    if whatever is None:
        return None
    # As large as it looks, less a quarter: half the time it is smaller than it looks.
    seen = _pairs_for(0.75 * max(abs(shift), margin - abs(shift)), deviation, alpha) or whatever
    return max(1, min(seen, whatever) - n), max(1, whatever - n)


def _pairs_for(goal: float, deviation: float, alpha: float) -> int | None:
    """The smallest number of pairs with which half a t interval is at most `goal`."""

    def enough(pairs: int) -> bool:
        return t_quantile(alpha, pairs - 1) * deviation / math.sqrt(pairs) <= goal

    found = bisect.bisect_left(range(MOST_PAIRS + 1), True, lo=3, key=enough)
    return found if found <= MOST_PAIRS else None


def _deviation_quartile(n: int) -> float:
    """By what factor the true standard deviation may exceed that of n values, with 75 % confidence."""
    from scipy.special import chdtri

    return math.sqrt((n - 1) / float(chdtri(n - 1, 0.75)))
