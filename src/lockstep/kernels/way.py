"""The ways to compute a convolution with what follows it, and which of them can compute a given one at all."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch


class Way(IntEnum):
    """How to compute it; the numbers go through the operators' signatures."""

    TORCH = 0
    DIRECT = 1
    WINOGRAD = 2


class Tail(IntEnum):
    """What follows the convolution and is computed with it. The first two are as good as "is there a pool?": False and True."""

    RELU = 0
    RELU_POOL = 1
    NOTHING = 2


# Of Winograd's 36 products per tile, the transforms take their share: it needs channels enough.
LEAST_CHANNELS = 16


def result_size(x: Sequence[int], weight: Sequence[int], padding: int, tail: int) -> tuple[int, int]:
    """Height and width of the result, from the sizes of input and weights; below 1 where nothing comes out."""
    height, width = (side + 2 * padding - kernel + 1 for side, kernel in zip(x[2:], weight[2:], strict=True))
    return (height // 2, width // 2) if tail == Tail.RELU_POOL else (height, width)


def possible(channels: int, out_channels: int, kernel: int, padding: int, dtype: torch.dtype) -> tuple[Way, ...]:
    """The ways that can compute it at all."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float64) or padding >= kernel or kernel not in (1, 3, 5):
        return (Way.TORCH,)
    if kernel == 3 and min(channels, out_channels) >= LEAST_CHANNELS:
        return Way.TORCH, Way.DIRECT, Way.WINOGRAD
    return Way.TORCH, Way.DIRECT
