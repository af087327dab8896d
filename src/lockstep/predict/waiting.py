"""Waiting for the slowest of N ranks, from the spread of one rank's steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

DRAWS = 4000


def slowest(noise: Sequence[float], ranks: int, steps: int = 1) -> float:
    """How far the slowest of N ranks lies above the mean, as a share of a step.

    `noise` are measured deviations from the mean, as shares. Ranks are assumed to be disturbed independently. This is the limit of a bootstrap of the
    maximum: the k-th smallest of n values is the largest of N draws with the probability (k / n)^N - ((k - 1) / n)^N. With
    `steps`, ranks meet only after N steps, and their means over these count.
    """
    if ranks < 2 or len(noise) == 0:
        return 0.0
    values = np.asarray(noise, dtype=float)
    if steps > 1:
        picks = np.random.default_rng(0).integers(len(values), size=(DRAWS, steps))
        values = values[picks].mean(axis=1)
    values = np.sort(values)
    probability = np.arange(len(values) + 1) / len(values)
    return float(values @ np.diff(probability**ranks) - values.mean())
