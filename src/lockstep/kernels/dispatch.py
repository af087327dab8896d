"""Which way computes a convolution: ours only where it was measured to be faster than PyTorch's operators.

A shape that was measured itself is decided by that; another one by the nearest that was. Far from all of them, PyTorch's own.
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache
from math import log2, sqrt
from typing import NamedTuple

import torch

from lockstep.kernels.table import Row, rows
from lockstep.machine.formats import cpu_support


class Way(IntEnum):
    """How to compute it; the numbers go through the operators' signatures."""

    TORCH = 0
    DIRECT = 1
    WINOGRAD = 2


class Layer(NamedTuple):
    """What is to be computed, as far as the choice depends on it."""

    batch: int
    channels: int
    width: int
    height: int
    breadth: int
    kernel: int
    padding: int
    pool: bool
    last: bool
    """Whether x lies in channels-last order."""
    dtype: torch.dtype


NEITHER = (Way.TORCH, Way.TORCH)
# Of Winograd's 36 products per tile, the transforms take their share: it needs channels enough.
LEAST_CHANNELS = 16
# A way has to be faster by so much: what is within the noise of a measurement is not taken.
MARGIN = 0.97
# PyTorch's operators take some 15 µs longer inside of ours: only where that is little may one direction be theirs and the other ours.
MIXED_MS = 0.5
# A neighbour in the table may be so many doublings away, over channels, width, size and batch together.
FAR = 3.0


def possible(channels: int, width: int, kernel: int, padding: int, dtype: torch.dtype) -> tuple[Way, ...]:
    """The ways that can compute it at all."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float64) or padding >= kernel or kernel not in (1, 3, 5):
        return (Way.TORCH,)
    if kernel == 3 and min(channels, width) >= LEAST_CHANNELS:
        return Way.TORCH, Way.DIRECT, Way.WINOGRAD
    return Way.TORCH, Way.DIRECT


def rule(layer: Layer) -> tuple[Way, Way]:
    """Without the table, for compiled graphs: few channels directly, many by Winograd's method if there are tiles enough."""
    ways = possible(layer.channels, layer.width, layer.kernel, layer.padding, layer.dtype)
    if layer.dtype is torch.float64:  # for checking: nothing was done for its speed
        return NEITHER
    if Way.WINOGRAD in ways and layer.batch * layer.height * layer.breadth >= 512:
        return Way.WINOGRAD, Way.WINOGRAD
    if Way.DIRECT in ways and layer.kernel == 3 and layer.channels <= 8:
        return Way.DIRECT, Way.DIRECT
    return NEITHER


@lru_cache(maxsize=4096)
def choose(layer: Layer, threads: int, grad_x: bool, isa: str) -> tuple[Way, Way]:
    """The ways forward and backward, by the table for this processor."""
    batch, channels, width, height, breadth, kernel, padding, pool, last, dtype = layer
    ways = possible(channels, width, kernel, padding, dtype)
    if len(ways) == 1 or batch == 0:
        return NEITHER
    size = sqrt(height * breadth)
    # Without instructions for bfloat16 PyTorch takes many times as long in it, and ours as long as in float32.
    through_float = dtype is torch.bfloat16 and not cpu_support()["bf16"]
    name = "float32" if through_float else str(dtype).removeprefix("torch.")
    near = [row for row in rows(isa) if (row.kernel, row.pool, row.last, row.dtype) == (kernel, pool, last, name)]
    # Beyond the largest batch that was measured, all ways take so much longer.
    wanted = (channels, width, size, min(batch, max((row.batch for row in near), default=1)))
    row = min(near, key=lambda row: _distance(row, wanted, threads, grad_x), default=None)
    if row is None or _distance(row, wanted, threads, grad_x) > FAR:
        return NEITHER
    return _best(row, ways)


def _distance(row: Row, wanted: tuple[int, int, float, int], threads: int, grad_x: bool) -> float:
    """In doublings. The number of threads and whether x learns too only decide between rows that are equally near."""
    shape = (row.channels, row.width, row.size, row.batch)
    far = sum(abs(log2(a / b)) for a, b in zip(shape, wanted, strict=True))
    return far + 0.1 * abs(log2(row.threads / threads)) + 0.01 * (row.grad_x != grad_x)


def _best(row: Row, ways: tuple[Way, ...]) -> tuple[Way, Way]:
    def fastest(times: dict[str, float]) -> Way:
        ours = [way for way in ways if way is not Way.TORCH and way.name.lower() in times]
        way = min(ours, key=lambda way: times[way.name.lower()], default=Way.TORCH)
        return way if times.get(way.name.lower(), 0) < MARGIN * times["torch"] else Way.TORCH

    if not row.pool:
        ways_of = fastest(row.forward), fastest(row.backward)
        mixed = (ways_of[0] is Way.TORCH) != (ways_of[1] is Way.TORCH)
        return NEITHER if mixed and min(row.forward["torch"], row.backward["torch"]) < MIXED_MS else ways_of
    # What the way back of a pool needs is a thing of ours: both or neither.
    together = {name: row.forward[name] + row.backward[name] for name in row.forward}
    return fastest(together), fastest(together)
