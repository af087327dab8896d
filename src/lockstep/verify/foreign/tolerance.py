"""How far rounding may put the ranks from one process, measured on this very script."""

from __future__ import annotations

import numpy as np

from lockstep.inside.parameters import SIZE
from lockstep.verify.foreign.numbers import distances, raw, sizes_apart
from lockstep.verify.foreign.records import Array, Rank, Step, Truths, is_coarse

# What a difference from one process has to exceed at least, as a share of a parameter's gradient or update: where a ReLU or a max-pool is as near
# to its kink as rounding, the gradient of a small batch jumps by a part of it.
FLOOR, LOSS_FLOOR = 3e-3, 1e-4
# In 16 bits, eight roundings.
COARSE_FLOOR, COARSE_LOSS_FLOOR = 2.0**-5, 1e-2
TIMES = 6.0
# Where so much is allowed, a fault could be taken for rounding, and nothing is proven.
TOO_MUCH = 0.5
# Settings of optimizers that divide by the size of each entry, so that their first updates are the signs of the gradients.
DIVIDES = {"eps", "beta2"}
# In 16 bits some of the signs differ. From then on weights differ by whole steps, and ReLUs are at their kinks that were not: gradients of a net
# with 2000 weights were up to 0.13 apart where its twin's were 0.02 (tests/foreign/ddp.py, amp-adam, 480 steps).
SIGNS_FLOOR = 0.25
# How many signs ever differ, as much of an update's size: up to 0.05 were seen.
SIZE_FLOOR = 0.25


class Tolerance:
    """Its one process is compared with the same one with weights that are a few roundings away.

    What is allowed grows from step to step, as rounding does, and holds for each parameter by itself.
    """

    def __init__(self, one: Rank, twin: Rank) -> None:
        self.coarse = is_coarse([one])
        """The script computes in 16 bits."""
        self._floor, self._loss_floor = (COARSE_FLOOR, COARSE_LOSS_FLOOR) if self.coarse else (FLOOR, LOSS_FLOOR)
        self._gradients: list[Array] = []
        self._updates: list[Array] = []
        self._sizes: list[Array] = []
        self._losses: list[float] = []
        self._signs = [any(DIVIDES & group.keys() for group in step.line.settings) for step in one]
        for ours, theirs in zip(one, twin, strict=False):
            if len(ours.own) != len(theirs.own):
                break
            self._gradients.append(self._grown(self._gradients, distances(raw(theirs), raw(ours), ours)))
            self._updates.append(self._grown(self._updates, distances(theirs.update, ours.update, ours)))
            self._sizes.append(self._grown(self._sizes, sizes_apart(theirs.update, ours.update, ours)))
            a, b = ours.loss, theirs.loss
            away = abs(a - b) / (abs(a) or 1.0) if a is not None and b is not None else 0.0
            self._losses.append(max([away, *self._losses[-1:]]))

    @staticmethod
    def _grown(before: list[Array], now: Array) -> Array:
        same = before and len(before[-1]) == len(now)
        return np.maximum(now, before[-1]) if same else now

    def gradients(self, at: int, count: int) -> Array:
        return np.maximum(self._least(at), TIMES * _at(self._gradients, at, count))

    def share(self, at: int) -> float:
        """Of the gradient as a whole."""
        measured = self._gradients[at] if at < len(self._gradients) else np.zeros(0)
        return max(self._least(at), TIMES * float(np.median(measured)) if len(measured) else 0.0)

    def _least(self, at: int) -> float:
        return SIGNS_FLOOR if self.coarse and any(self._signs[:at]) else self._floor

    def updates(self, at: int, count: int) -> Array:
        """Where gradients with normal entries are a share d apart, d / pi of their signs differ, and updates that are signs are 2 sqrt(d / pi) apart:
        what is six times as much of a gradient is the root of six times as much of an update."""
        measured = _at(self._updates, at, count)
        allowed = TIMES * measured
        if self.takes_signs(at):
            signs = np.maximum(2 * np.sqrt(self._floor / np.pi), TIMES**0.5 * measured)
            # In 16 bits some signs always differ, and not always those of the same parameters.
            allowed = signs if self.coarse else np.minimum(allowed, signs)
        return np.maximum(self._floor, allowed)

    def single_signs(self, one: Step, at: int) -> Array:
        """What an update may be off beyond that: in a parameter of a few entries a single sign matters, and the twin need not have met it. Signs
        are open of entries that are smaller than what is allowed at least. Of larger parameters, only sums of entries are known."""
        found = np.zeros(len(one.line.layout))
        for number, part in enumerate(one.slices if self.takes_signs(at) else []):
            gradient, update = one.exchanged[part], one.update[part]
            length = float(np.linalg.norm(update))
            if length and len(gradient) < SIZE:
                small = np.abs(gradient) <= self._floor * np.sqrt(np.mean(gradient**2))
                found[number] = 2 * float(np.linalg.norm(update[small])) / length
        return found

    def sizes(self, at: int, count: int) -> Array:
        """Of updates whose signs are open."""
        return np.maximum(SIZE_FLOOR, TIMES * _at(self._sizes, at, count))

    def takes_signs(self, at: int) -> bool:
        return at < len(self._signs) and self._signs[at]

    def says_nothing(self, allowed: Array) -> Truths:
        """For which parameters it is so large that it would pass a fault. In 16 bits, one ReLU at its kink moves the gradient of a whole layer:
        there, it takes half of the parameters."""
        found: Truths = allowed >= TOO_MUCH
        if self.coarse and float(np.median(allowed)) < TOO_MUCH:
            found = ~np.isfinite(allowed)
        return found

    def loss(self, at: int) -> float:
        return max(self._loss_floor, TIMES * self._losses[at] if at < len(self._losses) else 0.0)


def _at(measured: list[Array], at: int, count: int) -> Array:
    return measured[at] if at < len(measured) and len(measured[at]) == count else np.zeros(count)
