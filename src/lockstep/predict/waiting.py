"""Waiting for the slowest of N ranks, from the spread of one rank's steps. Ranks of one host may be late together; hosts are not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

DRAWS = 4000


def apart(deviations: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Deviations of steps, by rank and step, as what each rank has by itself and what all have in common.

    What two ranks have in common is their covariance. The mean over ranks has it too, and a share of each rank's own, which shrinks it to size.
    """
    ranks = len(deviations)
    mean = deviations.mean(axis=0)
    if ranks < 2:
        return deviations, np.zeros_like(mean)
    common = (ranks * mean.var() - deviations.var(axis=1).mean()) / (ranks - 1)
    if common <= 0:
        return deviations, np.zeros_like(mean)
    return (deviations - mean) * (ranks / (ranks - 1)) ** 0.5, mean * (common / mean.var()) ** 0.5


def slowest(
    noise: Sequence[float], ranks: int, steps: int = 1, common: Sequence[float] = (), per_host: int = 1
) -> float:
    """How far the slowest of N ranks lies above the mean, as a share of a step.

    `noise` are measured deviations from the mean, as shares, which each rank has by itself; `common` are those that all ranks of a host have
    together. This is the limit of a bootstrap of the maximum: the k-th smallest of n values is the largest of N draws with the
    probability (k / n)^N - ((k - 1) / n)^N. With `steps`, ranks meet only after N steps, and their means over these count.
    """
    if ranks < 2 or len(noise) == 0:
        return 0.0
    chance = np.random.default_rng(0)
    own = _drawn(noise, steps, chance)
    if len(common) == 0:
        return _largest(own, ranks) - float(own.mean())
    # A host is as late as the latest of its ranks, and then there are so many hosts.
    place = np.minimum((chance.random(DRAWS) ** (1 / per_host) * len(own)).astype(int), len(own) - 1)
    host = np.sort(own)[place] + chance.choice(_drawn(common, steps, chance), DRAWS)
    return _largest(host, ranks // per_host) - float(own.mean()) - float(np.mean(common))


def _drawn(noise: Sequence[float], steps: int, chance: np.random.Generator) -> np.ndarray[Any, Any]:
    values = np.asarray(noise, dtype=float)
    return values if steps == 1 else values[chance.integers(len(values), size=(DRAWS, steps))].mean(axis=1)


def _largest(values: np.ndarray[Any, Any], count: int) -> float:
    """The mean of the largest of N draws."""
    probability = np.arange(len(values) + 1) / len(values)
    return float(np.sort(values) @ np.diff(probability**count))
