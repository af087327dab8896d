"""How late one of many is: measured deviations, and beyond the largest of them a tail that is fitted to the largest.

The latest of 10,000 ranks is later than anything that 4,000 steps have shown. What lies beyond a high threshold follows a generalized Pareto
distribution, whatever the whole looks like (Pickands; Balkema and de Haan). Its scale and shape come from probability-weighted moments
(Hosking and Wallis 1987), which have a closed form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Values = np.ndarray[Any, Any]

# The tail is fitted to the largest fifty, of five hundred at least, and takes over from the largest ten on: up to there they are used as measured.
LARGEST, AS_MEASURED, FEWEST = 50, 10, 500
# A bounded tail has a shape below zero, an exponential one zero, a heavy one more. Fifty values know it to about 0.2, so it stays near zero.
MOST_SHAPE = 0.25
# Where the largest of many is looked at: the middles of equally probable parts.
PARTS = (np.arange(2000) + 0.5) / 2000


class Tail(NamedTuple):
    """Values beyond a threshold."""

    share: float
    """How many of all values are beyond it."""
    threshold: float
    scale: float
    shape: float

    def at(self, survival: Values) -> Values:
        """The value that a share of `survival` of all values exceeds."""
        rarer = np.log(self.share / survival)
        grown = rarer if abs(self.shape) < 1e-9 else np.expm1(self.shape * rarer) / self.shape
        return self.threshold + self.scale * grown


class Lateness:
    """Deviations of single steps from their mean, as shares of a step."""

    def __init__(self, deviations: Sequence[float] | Values) -> None:
        self._sorted = np.sort(np.asarray(deviations, dtype=float), axis=None)
        self.mean = float(self._sorted.mean())
        self.tail = fit_tail(self._sorted)

    def at(self, survival: Values) -> Values:
        """The deviation that a share of `survival` of all steps exceeds: as measured, and in the tail as fitted."""
        count = len(self._sorted)
        place = np.clip(((1 - survival) * count).astype(int), 0, count - 1)
        measured: Values = self._sorted[place]
        if self.tail is None:
            return measured
        beyond = survival < AS_MEASURED / count
        return np.where(beyond, self.tail.at(np.where(beyond, survival, self.tail.share)), measured)

    def largest(self, count: float) -> float:
        """The mean of the largest of N independent ones; N need not be whole."""
        return float(self.at(-np.expm1(np.log(PARTS) / count)).mean())


def fit_tail(ascending: Values) -> Tail | None:
    """None where there are too few values, or where the largest are all the same."""
    if len(ascending) < FEWEST:
        return None
    # Half-way to the next smaller value, so that the smallest of the largest is beyond it too.
    threshold = float(ascending[-LARGEST - 1 : -LARGEST + 1].mean())
    beyond = ascending[-LARGEST:] - threshold
    mean = float(beyond.mean())
    rarity = 1 - (np.arange(1, LARGEST + 1) - 0.35) / LARGEST
    weighted = float((rarity * beyond).mean())
    if mean <= 2 * weighted:
        return None
    shape = float(np.clip(2 - mean / (mean - 2 * weighted), -MOST_SHAPE, MOST_SHAPE))
    # The scale that has the measured mean at this shape.
    return Tail(LARGEST / len(ascending), threshold, mean * (1 - shape), shape)
