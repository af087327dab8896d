"""Lockstep's own int8 convolution (csrc/winograd8.cpp), where it can compute a layer; oneDNN's kernels for the others."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.quantize import native
from lockstep.quantize.kernels import OneDnnKernels, Spot, pool_arguments
from lockstep.quantize.scheme import Numbers

COLUMNS = 16
# Sums of products have to stay within 32 bits: 4 x 255 x 127 x 9 for each channel.
MOST_CHANNELS = 1024
HALVES = [[2, 2], [2, 2], [0, 0], [1, 1], False]
# Twice Winograd's G, so that it has no halves; a product has it twice, so results are four times too large.
_G = torch.tensor([[2, 0, 0], [1, 1, 1], [1, -1, 1], [0, 0, 2]], dtype=torch.int32)
QUARTER = 0.25


def can(spot: Spot, integers: bool) -> bool:
    """3x3 with stride 1 and padding 0 or 1, channels by sixteens, bytes in and bytes out."""
    if not (spot.conv and integers and spot.weight.shape[2:] == (3, 3)):
        return False
    outputs, channels = spot.weight.shape[:2]
    stride, padding, dilation, groups = spot.arguments
    return (
        (stride, dilation, groups) == ([1, 1], [1, 1], 1)
        and padding in ([0, 0], [1, 1])
        and not outputs % COLUMNS
        and not channels % COLUMNS
        and channels <= MOST_CHANNELS
    )


def packed(weight: Tensor) -> Tensor:
    """Weights transformed, in the order in which the kernel reads them: output / 16, place, channel / 2, 16 outputs, 2 channels."""
    outputs, channels = weight.shape[:2]
    moved = torch.einsum("ij,ocjk,lk->ocil", _G, weight.to(torch.int32), _G)
    parts = moved.to(torch.int16).view(outputs // COLUMNS, COLUMNS, channels // 2, 2, 16)
    return parts.permute(0, 4, 2, 1, 3).contiguous()


class WinogradConv(nn.Module):
    """Convolution, ReLU and rounding in one call; with `pool` also a max-pool by two."""

    def __init__(self, spot: Spot) -> None:
        super().__init__()
        assert spot.source is not None
        assert spot.result is not None
        self._function = native.winograd8()
        self._weight = packed(spot.weight)
        self.outputs, self.channels = spot.weight.shape[:2]
        self._factors, self._offsets = rounding(spot, spot.source, spot.result)
        self._padding, self.pool = spot.arguments[1][0], False
        zero, (_, result_zero, top) = spot.source.zero, spot.result
        self._ends = (zero, result_zero, result_zero if spot.relu else 0, top)

    def forward(self, values: Tensor) -> Tensor:
        values = values.contiguous(memory_format=torch.channels_last)
        batch, channels, height, width = values.shape
        assert channels == self.channels
        assert values.dtype == torch.uint8
        tall, wide = (side + 2 * self._padding - 2 for side in (height, width))
        pool = self.pool and not (tall % 2 or wide % 2)
        size = (batch, self.outputs, tall // 2, wide // 2) if pool else (batch, self.outputs, tall, wide)
        result = torch.empty(size, dtype=torch.uint8, memory_format=torch.channels_last)
        words = (batch, height, width, channels, self.outputs, self._padding, *self._ends, pool, torch.get_num_threads())
        pointers = (each.data_ptr() for each in (values, self._weight, self._factors, self._offsets, result))
        if batch and self._function((ctypes.c_int64 * len(words))(*words), *pointers):
            raise RuntimeError("int8 convolution: not enough memory for its scratch space")
        if self.pool and not pool:  # a row or a column that no pool takes
            result = torch.ops.quantized.max_pool2d(result, *HALVES)
        return result


def rounding(spot: Spot, source: Numbers, result: Numbers) -> tuple[Tensor, Tensor]:
    """A byte is sum x factor + offset, rounded, and the result's zero."""
    factors = spot.scales.float() * (source.scale / result.scale * QUARTER)
    bias = torch.zeros_like(factors) if spot.bias is None else spot.bias.float()
    return factors.contiguous(), (bias / result.scale).contiguous()


class OwnKernels(OneDnnKernels):
    @staticmethod
    def layer(spot: Spot, integers: bool) -> nn.Module:
        return WinogradConv(spot) if can(spot, integers) else OneDnnKernels.layer(spot, integers)

    @staticmethod
    def takes_pool(layer: nn.Module, arguments: list[Any]) -> bool:
        if isinstance(layer, WinogradConv) and pool_arguments(arguments) == HALVES:
            layer.pool = True
            return True
        return False
