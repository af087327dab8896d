"""Compute time as a function of the micro batch: of one rank alone, and with the other ranks of its host running too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A step of one rank that exchanges nothing, with `samples` samples in one pass."""

    samples: float
    seconds: float
    backward: float
    """The part of these seconds that is backward."""
    optimizer: float


class Parts(NamedTuple):
    """A step without exchange, and the backward pass that an exchange could hide behind."""

    compute: float
    wrapper: float
    contention: float
    backward: float


class Compute(msgspec.Struct, frozen=True, kw_only=True):
    """The measured steps, sorted by samples."""

    ranks: int
    """How many ranks shared the host in `sharing`."""
    wrapper: float
    """What the strategy costs beside the exchange, in a step of one pass."""
    alone: list[Point]
    sharing: list[Point]
    """With the wrapper, all ranks of the host at once."""

    def parts(self, micro: float, accumulation: int, sharing: int, room: int) -> Parts:
        """A step of `accumulation` passes of `micro` samples, on a host with N ranks, of which `room` can compute at the same time."""
        alone = at(self.alone, micro)
        compute = accumulation * (alone.seconds - alone.optimizer) + alone.optimizer
        # DDP's forward and its hooks recur in every pass.
        wrapper = accumulation * self.wrapper
        if sharing == 1 or self.ranks == 1 or not self.sharing:
            return Parts(compute, wrapper, 0.0, alone.backward)
        shared = at(self.sharing, micro)
        # Measured with one rank and with several; contention is assumed to grow linearly between the two, and beyond while there are cores.
        share = (min(sharing, room) - 1) / (self.ranks - 1)
        contention = accumulation * _grown(shared.seconds - self.wrapper - alone.seconds, share)
        backward = alone.backward + _grown(shared.backward - alone.backward, share)
        turns = max(1.0, sharing / room)  # more ranks than the host has cores for
        whole = compute + wrapper + contention
        return Parts(compute, wrapper, turns * whole - compute - wrapper, turns * backward)

    def covers(self, micro: float) -> bool:
        """Whether a pass of this many samples lies within the measured range."""
        return self.alone[0].samples <= micro <= self.alone[-1].samples


def _grown(excess: float, share: float) -> float:
    """What sharing costs at `share` times as many further ranks as were measured. Less than nothing is noise, and does not grow."""
    return excess * (share if excess > 0 else min(share, 1.0))


def at(points: Sequence[Point], samples: float) -> Point:
    """Interpolate linearly between the measured batches, and extrapolate beyond them. Small batches have a floor, so one line would not fit."""
    if len(points) == 1:
        return points[0]
    upper = next((i for i, point in enumerate(points) if point.samples >= samples), len(points) - 1)
    low, high = points[max(0, upper - 1)], points[max(1, upper)]
    share = (samples - low.samples) / (high.samples - low.samples)

    def between(one: float, other: float) -> float:
        return one + share * (other - one)

    return Point(
        samples=samples,
        seconds=between(low.seconds, high.seconds),
        backward=between(low.backward, high.backward),
        optimizer=between(low.optimizer, high.optimizer),
    )
