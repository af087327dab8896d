"""The statistics of a benchmark: medians, per-round comparisons and bootstrap intervals.

Contenders are compared *within* a round, because a machine's speed changes from minute to minute: what slows
one contender of a round slows the others as well, and cancels in their ratio.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

RESAMPLES = 10_000
LEVEL = 0.95


def median(values: Sequence[float]) -> float:
    """The middle value: a round that something else disturbed moves it little."""
    return float(np.median(values))


def bootstrap_interval(
    values: Sequence[float], level: float = LEVEL, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float] | None:
    """Percentile interval of the median. One value says nothing about its spread, so then there is none."""
    data = np.asarray(values, dtype=float)
    if len(data) < 2:
        return None
    picks = np.random.default_rng(seed).integers(len(data), size=(resamples, len(data)))
    medians = np.median(data[picks], axis=1)
    low, high = np.quantile(medians, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


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
