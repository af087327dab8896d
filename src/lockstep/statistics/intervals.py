"""What the values of one cell say: the interval of their median, and Student's t."""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

CELL_LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A confidence interval of a median."""

    low: float
    high: float
    level: float
    how: Literal["t", "exact"]


def median_interval(values: Sequence[float], level: float = CELL_LEVEL, log: bool = False) -> Interval | None:
    """The confidence interval of one cell's median; None for fewer than two values, which say nothing about their spread."""
    n = len(values)
    if n < 2:
        return None
    if 2 * 0.5**n > 1 - level:
        return _t_interval(values, level, log)
    # How many values lie below the median is binomial; as many are cut off at each end as the level allows.
    from scipy.special import bdtr

    cut = bisect.bisect_right(range(n), (1 - level) / 2, key=lambda k: bdtr(k, n, 0.5)) - 1
    ordered = sorted(values)
    return Interval(ordered[cut], ordered[n - 1 - cut], level, "exact")


def _t_interval(values: Sequence[float], level: float, log: bool) -> Interval:
    log = log and min(values) > 0
    data = [math.log(value) for value in values] if log else list(values)
    mean = statistics.fmean(data)
    half = t_quantile(1 - level, len(data) - 1) * statistics.stdev(data) / math.sqrt(len(data))
    low, high = mean - half, mean + half
    return Interval(math.exp(low) if log else low, math.exp(high) if log else high, level, "t")


def t_p(t: float, degrees: int) -> float:
    """The two-sided p-value of Student's t."""
    from scipy.special import stdtr

    return 2 * float(stdtr(degrees, -abs(t)))


def t_quantile(p: float, degrees: int) -> float:
    """The t whose two-sided p-value this is."""
    from scipy.special import stdtrit

    return -float(stdtrit(degrees, p / 2))
