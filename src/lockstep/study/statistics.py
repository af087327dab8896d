"""The statistics of a study: intervals that hold with three to ten repeats, and verdicts that say when nothing can be said.

Cells are compared within a block (same seed, same few minutes), so what slows the machine slows both. Where nothing differs, the two
runs of a block could as well be exchanged; so all 2^n exchanges give the exact chance of what was seen, whatever the noise looks like.
What is counted is places in the common ranking, not seconds: one run that something disturbed must not outweigh the others. Up to
six pairs this cannot reach the level asked for, and Student's t takes its place: wide there, and safe for symmetric noise with
heavy tails. docs/studies.md has what this and the bootstrap came to in simulations.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

# A study makes many comparisons, so a difference counts only where its 98 % interval leaves out "none".
COMPARE_LEVEL = 0.98
CELL_LEVEL = 0.95
# A difference that nobody would act on: 2 % of a time, half a point of accuracy.
SMALL_RATIO = 0.02
SMALL_DIFFERENCE = 0.005
MANY = 1000
EXACT_FROM, EXACT_UP_TO = 7, 20
# Over how many neighbouring blocks the machine's speed is smoothed before runs are ranked together.
DRIFT_WINDOW = 5
HALVINGS = 22

# Student's t for two-sided intervals, by degrees of freedom from 1.
_T = {
    0.95: (12.706, 4.303, 3.182, 2.776, 2.571, 2.447),
    0.98: (31.821, 6.965, 4.541, 3.747, 3.365, 3.143),
}

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
    """Ratio or difference."""
    low: float | None
    high: float | None
    verdict: Verdict
    more: int | None
    """How many more repeats would settle it; None where it is settled, or where a thousand would not."""
    how: str

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
    half = _T[level][len(data) - 2] * statistics.stdev(data) / math.sqrt(len(data))
    low, high = middle - half, middle + half
    return Interval(math.exp(low) if log else low, math.exp(high) if log else high, level, "t")


def compare(cell: Sequence[float], baseline: Sequence[float], kind: Kind) -> Comparison:
    """Pairs in the order of time. Times, rates and sizes are compared as ratios, accuracies and losses as differences."""
    n = len(cell)
    ratio = kind in ("time", "rate", "size") and min([*cell, *baseline], default=0.0) > 0
    ours, theirs = ([math.log(v) if ratio else v for v in values] for values in (cell, baseline))
    back: Callable[[float], float] = math.exp if ratio else float
    if n == 0:
        return Comparison(0, None, None, None, "too few", None, "no pair has both")
    if n == 1:
        return Comparison(
            1, back(ours[0] - theirs[0]), None, None, "too few", 2, "one pair says nothing about the spread"
        )
    if n < EXACT_FROM:
        middle, low, high, how = _by_t([a - b for a, b in zip(ours, theirs, strict=True)])
    else:
        # Machines drift, so times are compared over blocks near each other. What a seed does to an accuracy it does to both of
        # its pair and to no neighbour: there each pair has a level of its own, which makes this a signed-rank test.
        middle, low, high, how = _by_exchange(ours, theirs, DRIFT_WINDOW if kind in ("time", "rate", "size") else 1)
    small = math.log1p(SMALL_RATIO) if ratio else SMALL_DIFFERENCE
    verdict, more = _verdict(low, high, small, kind), None
    if verdict == "not significant":
        more = more_repeats(n, middle, (high - low) / 2, small)
    return Comparison(n, back(middle), back(low), back(high), verdict, more, how)


def _verdict(low: float, high: float, small: float, kind: Kind) -> Verdict:
    larger, smaller = WORDS[kind]
    if low > 0:
        return larger
    if high < 0:
        return smaller
    return "the same" if max(-low, high) <= small else "not significant"


def _by_t(differences: Sequence[float]) -> tuple[float, float, float, str]:
    n, middle, spread = len(differences), statistics.fmean(differences), statistics.stdev(differences)
    if spread == 0:
        # Values on a grid (an accuracy over few samples) can agree by chance; t would be certain of it.
        return middle, min(0.0, middle), max(0.0, middle), "equal steps"
    half = _T[COMPARE_LEVEL][n - 2] * spread / math.sqrt(n)
    return middle, middle - half, middle + half, "t"


def _by_exchange(ours: Sequence[float], theirs: Sequence[float], window: int) -> tuple[float, float, float, str]:
    """The shift that makes both alike, and the range of shifts that the exact test at the level does not rule out."""
    levels = _running_median([(a + b) / 2 for a, b in zip(ours, theirs, strict=True)], window)
    a = [value - level for value, level in zip(ours, levels, strict=True)]
    b = [value - level for value, level in zip(theirs, levels, strict=True)]
    reach = max(*a, *b) - min(*a, *b)
    middle = _edge(-reach, reach, lambda shift: sum(_places(a, b, shift)) > 0)
    far = 2 * reach + 1e-12
    low = _edge(middle - far, middle, lambda shift: chance(_places(a, b, shift)) <= 1 - COMPARE_LEVEL)
    high = _edge(middle, middle + far, lambda shift: chance(_places(a, b, shift)) > 1 - COMPARE_LEVEL)
    return middle, low, high, "exact" if len(ours) <= EXACT_UP_TO else "normal"


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


def _places(a: Sequence[float], b: Sequence[float], shift: float) -> list[int]:
    """How many places of the common ranking lie between the two of each pair (twice: equal values share a place)."""
    moved = [value - shift for value in a]
    ranked = sorted([*moved, *b])
    place: dict[float, int] = {}
    for position, value in enumerate(ranked):
        place.setdefault(value, position)
    last = {value: position for position, value in enumerate(ranked)}
    return [place[x] + last[x] - place[y] - last[y] for x, y in zip(moved, b, strict=True)]


def chance(places: Sequence[int]) -> float:
    """How often the exchange of pairs by coin would make a sum at least as far from zero as this one."""
    seen = abs(sum(places))
    sizes = [abs(place) for place in places]
    if len(places) > EXACT_UP_TO:
        deviation = math.sqrt(sum(size * size for size in sizes))
        return 1.0 if deviation == 0 else 2 - 2 * statistics.NormalDist().cdf(seen / deviation)
    # ways[t]: of the 2^n choices of pairs, how many have sizes that add up to t; the signed sum is then 2 t - whole.
    whole = sum(sizes)
    ways = [1] + [0] * whole
    for size in sizes:
        for total in range(whole, size - 1, -1):
            ways[total] += ways[total - size] if size else ways[total]
    far = sum(ways[: (whole - seen) // 2 + 1])
    return min(1.0, far / 2.0 ** (len(places) - 1))


def more_repeats(n: int, middle: float, half: float, small: float) -> int | None:
    """How many more pairs until the interval leaves out zero or lies within what is small, if all stays as it is."""
    spread = half * math.sqrt(n) / _factor(n)
    # Half an interval is itself uncertain: aim a quarter below what would just do.
    goal = max(abs(middle), small - abs(middle)) * 0.75
    for wanted in range(n + 1, MANY + 1):
        if _factor(wanted) * spread / math.sqrt(wanted) <= goal:
            return wanted - n
    return None


def _factor(n: int) -> float:
    """Half an interval in standard errors; above the table the normal one, a little widened."""
    table = _T[COMPARE_LEVEL]
    normal = statistics.NormalDist().inv_cdf((1 + COMPARE_LEVEL) / 2)
    return table[n - 2] if n - 2 < len(table) else normal * n / (n - 2)
