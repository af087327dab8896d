"""Waiting for the slowest of N ranks. Ranks of one host may be late together; hosts are disturbed independently of each other.

A host is as late as the latest of its ranks, and that was measured: the maximum of its R ranks in every step, however they depend on each
other. H hosts like it are H independent draws of that maximum. Hosts with P ranks instead of R need one number more: R ranks are as late
as R^a independent ones (the extremal coefficient of a Gumbel copula), where a = 1 are independent ranks and a = 0 ranks that are always
late together. It is chosen so that the mean of the measured maxima comes out, and P ranks are then (P / R)^a times as many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from lockstep.predict.lateness import Lateness, Values

Noise = tuple[tuple[float, ...], ...]
"""Deviations of steps from their mean, as shares, by rank and step: those of one step happened at the same time."""

MEANS = 4000
"""Drawn means, where ranks meet only every few steps."""
BISECTIONS = 30


class Late:
    """How late the ranks of one host are, one by one and together."""

    def __init__(self, deviations: Values) -> None:
        self.ranks, self.steps = deviations.shape
        self.rank = Lateness(deviations)
        self.host = Lateness(deviations.max(axis=0)) if self.ranks > 1 else self.rank
        self.independent = self._independent()
        # Each deviation's place among all, from the largest on.
        order = np.argsort(-deviations, axis=None, kind="stable")
        self._places = np.empty(order.size)
        self._places[order] = np.arange(order.size)
        self._places = self._places.reshape(deviations.shape)

    def slowest(self, hosts: int, per_host: int) -> float:
        """How far the latest of all ranks lies above the mean of one."""
        if per_host == 1:
            return self.rank.largest(hosts) - self.rank.mean
        exponent = math.log(self.independent) / math.log(self.ranks) if self.ranks > 1 else 1.0
        return self.host.largest(hosts * (per_host / self.ranks) ** exponent) - self.rank.mean

    def drawn(self, hosts: int, per_host: int, chance: np.random.Generator) -> Values:
        """A step of every rank, host by host: whole steps as they were measured, so that ranks are late together as they were.

        Beyond the ranks that were measured, a host takes more of such steps. In the tail each rank is drawn anew.
        """
        blocks = -(-per_host // self.ranks)
        steps = chance.integers(self.steps, size=(hosts, blocks))
        places = self._places[:, steps].transpose(1, 2, 0).reshape(hosts, -1)[:, :per_host].ravel()
        return self.rank.at((places + chance.random(places.size)) / self._places.size)

    def _independent(self) -> float:
        """How many independent ranks are as late as those of the host. Ranks that are late in turns count as independent."""
        low, high = 1.0, float(self.ranks)
        if self.ranks == 1 or self.rank.largest(high) <= self.host.mean:
            return high
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            low, high = (low, middle) if self.rank.largest(middle) > self.host.mean else (middle, high)
        return (low + high) / 2


@lru_cache(maxsize=8)
def late(noise: Noise, steps: int = 1) -> Late:
    """With `steps`, ranks meet only after N steps, and their means over these count."""
    deviations = np.array(noise, dtype=float)
    if steps > 1:
        drawn = np.random.default_rng(0).integers(deviations.shape[1], size=(MEANS // len(deviations), steps))
        deviations = deviations[:, drawn].mean(axis=2)
    return Late(deviations)


def slowest(noise: Noise, ranks: int, steps: int = 1, per_host: int = 1) -> float:
    """How far the slowest of N ranks lies above the mean, as a share of a step."""
    if ranks < 2 or not noise:
        return 0.0
    return late(noise, steps).slowest(ranks // per_host, per_host)


def noise_of(deviations: Sequence[Sequence[float]] | Values, most: int) -> Noise:
    """At most N numbers, of steps that are spread over all."""
    values = np.asarray(deviations, dtype=float)
    every = -(-values.size // most) or 1
    return tuple(tuple(round(float(one), 5) for one in rank) for rank in values[:, ::every])
