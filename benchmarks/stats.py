"""The statistics of a benchmark: medians, per-round comparisons and the intervals that studies use too.

Contenders are compared *within* a round, because a machine's speed changes from minute to minute: what slows
one contender of a round slows the others as well, and cancels in their ratio.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lockstep.statistics import median_interval


def median(values: Sequence[float]) -> float:
    """The median: a round that something else disturbed moves it little."""
    return float(np.median(values))


def interval(values: Sequence[float], log: bool = False) -> tuple[float, float] | None:
    """The 95 % interval of the median, as studies have it: exact from six values on, else Student's t (of the logs, for ratios)."""
    found = median_interval(values, log=log)
    return None if found is None else (found.low, found.high)


def ratio_per_round(ours: Mapping[int, float], theirs: Mapping[int, float]) -> list[float]:
    """Ours over theirs in every round that has both, in the order of the rounds."""
    return [ours[number] / theirs[number] for number in sorted(ours.keys() & theirs.keys())]


def difference_per_round(ours: Mapping[int, float], theirs: Mapping[int, float]) -> list[float]:
    """Ours less theirs in every round that has both, in the order of the rounds."""
    return [ours[number] - theirs[number] for number in sorted(ours.keys() & theirs.keys())]


def relative_spread(values: Sequence[float]) -> float:
    """How far apart the values are, as a share of the smallest; infinite where one is no number."""
    data = np.abs(np.asarray(values, dtype=float))
    if not np.all(np.isfinite(data)) or data.min() == 0:
        return float("inf")
    return float((data.max() - data.min()) / data.min())
