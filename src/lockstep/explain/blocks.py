"""The mean of something over a run's own steps, with its interval: neighbouring steps are slow together, so blocks of them are what varies."""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple

import numpy as np

from lockstep.measure.phases import Rows
from lockstep.statistics import ALPHA, MARGIN_RATIO, median_interval, t_quantile

# The run's own steps are divided into this many.
BLOCKS = 20


class Mean(NamedTuple):
    """With its 95 % interval; without one (a single block) it is from minus to plus infinity: it settles nothing."""

    value: float
    low: float
    high: float

    def of(self, whole: float) -> Mean:
        """As a share of something."""
        return Mean(*(each / whole for each in self))

    @property
    def surely(self) -> bool:
        """Of a share of a step: whether it is more than a difference that nobody would act on. Only then a cause is named."""
        return self.low > MARGIN_RATIO

    @property
    def ends(self) -> tuple[float, float] | None:
        return (self.low, self.high) if math.isfinite(self.high) else None


def means(values: Rows) -> list[float]:
    """Of each block."""
    return [float(block.mean()) for block in np.array_split(values, min(BLOCKS, len(values)))]


def mean(values: Rows) -> Mean:
    """Of one value for each step, or for each epoch."""
    whole, found = float(np.mean(values)), means(values)
    if len(found) < 2:
        return Mean(whole, -math.inf, math.inf)
    half = t_quantile(ALPHA, len(found) - 1) * statistics.stdev(found) / math.sqrt(len(found))
    return Mean(whole, whole - half, whole + half)


def middle(values: Rows) -> Mean:
    """The median of the blocks' means, which a few blocks with something else in them do not move."""
    found = means(values)
    ends = median_interval(found)
    low, high = (ends.low, ends.high) if ends else (-math.inf, math.inf)
    return Mean(statistics.median(found), low, high)
