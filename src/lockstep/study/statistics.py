"""The statistics of a study: intervals that hold with three to ten repeats, and verdicts that say when nothing can be said.

Cells are compared within a block (same seed, one run right after the other), so what slows the machine slows both. Where nothing differs, the
two runs of a block could as well be exchanged: a paired permutation test over all 2^n exchanges gives the exact p-value, whatever the noise
looks like. It adds up ranks, not seconds, so one disturbed run cannot outweigh the others. With few pairs no exchange is rare enough for
the level asked for, and Student's t takes its place: wide there, and safe for symmetric noise with heavy tails.

The comparisons of one metric are one family: Holm's procedure holds the chance of any false verdict among them at 5 %. What lies within
the equivalence margin for certain is "the same", however small its interval. docs/studies.md has what this comes to in simulations.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

ALPHA = 0.05
"""How often a family of comparisons in which nothing differs may have a verdict."""
CELL_LEVEL = 0.95
# The equivalence margin, a difference that nobody would act on: 2 % of a time, half a point of accuracy.
SMALL_RATIO = 0.02
SMALL_DIFFERENCE = 0.005
MANY = 1000
EXACT_UP_TO = 20
# Over how many neighbouring blocks the machine's speed is smoothed before runs are ranked together.
DRIFT_WINDOW = 5
HALVINGS = 22
# A time that was not reached is longer than any other. On the scale of logs this is beyond every time; ranks do not care how far.
NEVER = 1000.0

Verdict = Literal["faster", "slower", "better", "worse", "higher", "lower", "the same", "not significant", "too few"]
Kind = Literal["time", "accuracy", "loss", "rate", "size"]
# What a larger value is called, and a smaller one.
WORDS: dict[Kind, tuple[Verdict, Verdict]] = {
    "time": ("slower", "faster"),
    "rate": ("faster", "slower"),
    "accuracy": ("better", "worse"),
    "loss": ("worse", "better"),
    "size": ("higher", "lower"),
}


@dataclass(frozen=True)
class Interval:
    """Where a middle value lies, with this much confidence."""

    low: float
    high: float
    level: float
    how: Literal["t", "exact"]


@dataclass(frozen=True)
class Comparison:
    """One cell against the baseline, pair by pair: a ratio for times, rates and sizes, else a difference."""

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


def median_interval(values: Sequence[float], level: float = CELL_LEVEL, log: bool = False) -> Interval | None:
    """The interval of one cell's middle. One value says nothing about its spread, so then there is none."""
    n = len(values)
    if n < 2:
        return None
    if 2 * 0.5**n > 1 - level:
        return _t_interval(values, level, log)
    # How many values lie below the median is binomial; as many are cut off at each end as the level bears.
    ordered, cut, tail = sorted(values), 0, 0.5**n
    while tail + math.comb(n, cut + 1) * 0.5**n <= (1 - level) / 2:
        cut += 1
        tail += math.comb(n, cut) * 0.5**n
    return Interval(ordered[cut], ordered[n - 1 - cut], level, "exact")


def _t_interval(values: Sequence[float], level: float, log: bool) -> Interval:
    log = log and min(values) > 0
    data = [math.log(value) for value in values] if log else list(values)
    middle = statistics.fmean(data)
    half = t_quantile(1 - level, len(data) - 1) * statistics.stdev(data) / math.sqrt(len(data))
    low, high = middle - half, middle + half
    return Interval(math.exp(low) if log else low, math.exp(high) if log else high, level, "t")


# ---------------------------------------------------------------- comparisons

Values = Sequence[float]


def compare(cell: Values, baseline: Values, kind: Kind) -> Comparison:
    """One comparison by itself. Pairs are in the order of time; infinity stands for a time that was not reached."""
    return compare_family([(cell, baseline)], kind)[0]


def compare_family(pairs: Sequence[tuple[Values, Values]], kind: Kind, alpha: float = ALPHA) -> list[Comparison]:
    """All comparisons of one metric. Holm: the smallest p-value has to beat alpha / m, the next one alpha / (m - 1), and so on until one fails."""
    size = sum(len(cell) > 1 for cell, _ in pairs)
    found = [_Pairs(cell, baseline, kind, alpha / max(1, size)) for cell, baseline in pairs]
    size = sum(each.n > 1 for each in found)
    p_values = [each.p() if each.n > 1 else 1.0 for each in found]
    share, failed, compared = alpha, False, 0
    results: dict[int, Comparison] = {}
    for place in sorted(range(len(found)), key=lambda place: p_values[place]):
        if found[place].n > 1:
            share = share if failed else alpha / (size - compared)
            failed = failed or p_values[place] > share
            compared += 1
        results[place] = _comparison(found[place], p_values[place], share, kind)
    return [results[place] for place in range(len(found))]


class _Pairs:
    """Two sides that were measured pair by pair, and the test that fits them: exact where enough pairs make a rare exchange possible."""

    def __init__(self, cell: Values, baseline: Values, kind: Kind, strictest: float) -> None:
        self.n = len(cell)
        scaled = kind in ("time", "rate", "size")
        self.ratio = scaled and min([*cell, *baseline], default=0.0) > 0
        self.small = math.log1p(SMALL_RATIO) if self.ratio else SMALL_DIFFERENCE
        ours, theirs = ([math.log(v) if self.ratio else v for v in values] for values in (cell, baseline))
        # Machines drift, so times are compared over blocks near each other. What a seed does to an accuracy it does to both of
        # its pair and to no neighbour: there each pair has a level of its own, which makes this a signed-rank test.
        window = DRIFT_WINDOW if scaled else 1
        self.censored = any(math.isinf(value) for value in (*ours, *theirs))
        if self.censored:
            # Two runs that both never got there say nothing about which of them is the slower one.
            known = [(a, b) for a, b in zip(ours, theirs, strict=True) if not (math.isinf(a) and math.isinf(b))]
            self.n, window = len(known), 1
            ours, theirs = [_gap(a, b) for a, b in known], [0.0] * self.n
        self.exact = self.censored or 0.5 ** (self.n - 1) <= strictest
        self.differences = [a - b for a, b in zip(ours, theirs, strict=True)]
        levels = _running_median([(a + b) / 2 for a, b in zip(ours, theirs, strict=True)], window)
        self.ours = [value - level for value, level in zip(ours, levels, strict=True)]
        self.theirs = [value - level for value, level in zip(theirs, levels, strict=True)]

    def p(self) -> float:
        """How often as large a difference would be there if nothing differed."""
        if self.exact:
            return permutation_p(rank_differences(self.ours, self.theirs, 0.0))
        spread = statistics.stdev(self.differences)
        if spread == 0:
            # Values on a grid (an accuracy over few samples) can agree by chance; t would be certain of it.
            return 0.5 ** (self.n - 1) if self.differences[0] else 1.0
        return t_p(statistics.fmean(self.differences) / spread * math.sqrt(self.n), self.n - 1)

    def interval(self, alpha: float) -> tuple[float, float, float, str]:
        """The shift that makes both sides alike, the range of shifts that the test does not rule out, and which test it was."""
        if self.exact:
            return self._by_permutation(alpha)
        middle, spread = statistics.fmean(self.differences), statistics.stdev(self.differences)
        if spread == 0:
            return middle, min(0.0, middle), max(0.0, middle), "equal steps"
        half = t_quantile(alpha, self.n - 1) * spread / math.sqrt(self.n)
        return middle, middle - half, middle + half, "t"

    def _by_permutation(self, alpha: float) -> tuple[float, float, float, str]:
        a, b = self.ours, self.theirs
        reach = max(*a, *b) - min(*a, *b)
        middle = _edge(-reach, reach, lambda shift: sum(rank_differences(a, b, shift)) > 0)
        far = 2 * reach + 1e-12
        low = _edge(middle - far, middle, lambda shift: permutation_p(rank_differences(a, b, shift)) <= alpha)
        high = _edge(middle, middle + far, lambda shift: permutation_p(rank_differences(a, b, shift)) > alpha)
        return middle, low, high, "exact" if self.n <= EXACT_UP_TO else "normal"


def _gap(ours: float, theirs: float) -> float:
    """The difference of two logs, one of which may be infinite."""
    return NEVER if math.isinf(ours) else -NEVER if math.isinf(theirs) else ours - theirs


def _comparison(pairs: _Pairs, p: float, alpha: float, kind: Kind) -> Comparison:
    back: Callable[[float], float] = math.exp if pairs.ratio else float
    if pairs.n == 0:
        return Comparison(0, None, None, None, "too few", None, "no pair has both")
    if pairs.n == 1:
        only = None if pairs.censored else back(pairs.differences[0])
        return Comparison(1, only, None, None, "too few", None, "one pair says nothing about the spread")
    if pairs.censored:
        return _censored(pairs, p, alpha, kind)
    middle, low, high, how = pairs.interval(alpha)
    verdict = _verdict(low, high, pairs.small, kind)
    more = None
    if verdict == "not significant":
        more = more_pairs(pairs.n, middle, (high - low) / 2, pairs.small, alpha)
    return Comparison(pairs.n, back(middle), back(low), back(high), verdict, more, how, p, 1 - alpha)


def _censored(pairs: _Pairs, p: float, alpha: float, kind: Kind) -> Comparison:
    """Where a side did not get there in some pairs, ranks tell which is the slower one, and nothing tells by how much at most."""
    larger, smaller = WORDS[kind]
    verdict: Verdict = "not significant"
    if p <= alpha:
        verdict = larger if sum(rank_differences(pairs.ours, pairs.theirs, 0.0)) > 0 else smaller
    middle = statistics.median(pairs.differences)
    effect = None if abs(middle) > NEVER / 10 else math.exp(middle)
    return Comparison(pairs.n, effect, None, None, verdict, None, "exact", p, 1 - alpha)


def _verdict(low: float, high: float, small: float, kind: Kind) -> Verdict:
    larger, smaller = WORDS[kind]
    if max(-low, high) <= small:
        return "the same"
    if low > 0:
        return larger
    return smaller if high < 0 else "not significant"


# ---------------------------------------------------------------- the permutation test


def _edge(low: float, high: float, holds: Callable[[float], bool]) -> float:
    """Where a condition that holds on the left stops to hold."""
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _running_median(values: Sequence[float], window: int) -> list[float]:
    half = window // 2
    return [statistics.median(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def rank_differences(a: Sequence[float], b: Sequence[float], shift: float) -> list[int]:
    """Of each pair, the difference of its ranks in the common ranking (doubled, because equal values share a rank)."""
    moved = [value - shift for value in a]
    ranked = sorted([*moved, *b])
    first: dict[float, int] = {}
    for position, value in enumerate(ranked):
        first.setdefault(value, position)
    last = {value: position for position, value in enumerate(ranked)}
    return [first[x] + last[x] - first[y] - last[y] for x, y in zip(moved, b, strict=True)]


def permutation_p(ranks: Sequence[int]) -> float:
    """How often the exchange of pairs by coin would make a sum at least as far from zero as this one."""
    seen = abs(sum(ranks))
    sizes = [abs(rank) for rank in ranks]
    if len(ranks) > EXACT_UP_TO:
        deviation = math.sqrt(sum(size * size for size in sizes))
        return 1.0 if deviation == 0 else 2 - 2 * statistics.NormalDist().cdf(seen / deviation)
    # ways[t]: of the 2^n choices of pairs, how many have sizes that add up to t; the signed sum is then 2 t - whole.
    whole = sum(sizes)
    ways = [1] + [0] * whole
    for size in sizes:
        for total in range(whole, size - 1, -1):
            ways[total] += ways[total - size] if size else ways[total]
    far = sum(ways[: (whole - seen) // 2 + 1])
    return min(1.0, far / 2.0 ** (len(ranks) - 1))


# ---------------------------------------------------------------- Student's t


def t_p(t: float, degrees: int) -> float:
    """The two-sided p-value of Student's t with a whole number of degrees of freedom: a finite series in cos(angle)."""
    angle = math.atan(abs(t) / math.sqrt(degrees))
    cosine, sine = math.cos(angle), math.sin(angle)
    term, total = (cosine, 0.0) if degrees % 2 else (1.0, 0.0)
    for k in range(degrees // 2):
        if k:
            term *= cosine * cosine * (2 * k / (2 * k + 1) if degrees % 2 else (2 * k - 1) / (2 * k))
        total += term
    inside = 2 / math.pi * (angle + sine * total) if degrees % 2 else sine * total
    return max(0.0, 1 - inside)


def t_quantile(p: float, degrees: int) -> float:
    """The t whose two-sided p-value this is."""
    high = 1.0
    while t_p(high, degrees) > p:
        high *= 2
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_p(middle, degrees) > p else (low, middle)
    return high


# ---------------------------------------------------------------- how many more


def more_pairs(n: int, middle: float, half: float, small: float, alpha: float) -> tuple[int, int] | None:
    """How many more pairs would settle it, if the machine stays as noisy as it was: if the difference is as large as it looks, and whatever it is.

    Half an interval below half the margin settles every case: a difference is then either seen or within the margin. Few pairs say
    little about the noise, so it is taken at the upper quartile of what it may be; where that asks for more than a thousand, no number is
    honest.
    """
    if n < 3:
        return None
    spread = half * math.sqrt(n) / t_quantile(alpha, n - 1) * _spread_may_be(n)
    whatever = _pairs_for(small / 2, spread, alpha)
    if whatever is None:
        return None
    # As large as it looks, less a quarter: half the time it is smaller than it looks.
    seen = _pairs_for(0.75 * max(abs(middle), small - abs(middle)), spread, alpha) or whatever
    return max(1, min(seen, whatever) - n), max(1, whatever - n)


def _pairs_for(goal: float, spread: float, alpha: float) -> int | None:
    """From how many pairs on half an interval is this small."""
    normal = statistics.NormalDist().inv_cdf(1 - alpha / 2)

    def enough(pairs: int) -> bool:
        # Above a handful Student's t is the normal quantile, a little widened.
        quantile = t_quantile(alpha, pairs - 1) if pairs < 8 else normal * pairs / (pairs - 2)
        return quantile * spread / math.sqrt(pairs) <= goal

    found = bisect.bisect_left(range(MANY + 1), True, lo=3, key=enough)
    return found if found <= MANY else None


def _spread_may_be(n: int) -> float:
    """By what factor the true spread may exceed that of n values, with 75 % confidence (chi-square by Wilson and Hilferty)."""
    degrees = n - 1
    part = 2 / (9 * degrees)
    return float((1 - part - 0.6745 * math.sqrt(part)) ** -1.5)
