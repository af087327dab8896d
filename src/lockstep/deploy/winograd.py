"""Lockstep's own int8 convolution (csrc/winograd8.cpp, compiled on first use), where it can compute a layer; oneDNN's kernels for the others.

It is for CPUs with AVX2 and without VNNI (AMD up to Zen 3, Intel from Haswell to Skylake). On such a machine, with document A's net, it was 1.2
to 1.5 times as fast as oneDNN's kernels and 1.3 to 2.4 times as fast as ONNX Runtime at batches of 32 and 128 (docs/quantization.md).
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.deploy.kernels import POOL_BY_TWO, LayerSpec, OneDnnKernels, lacking, pool_arguments, rounding
from lockstep.errors import InputError
from lockstep.machine.native_code import CannotBuild, Library, load
from lockstep.torch_private import quantized

FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-mavx2", "-mfma", "-mtune=znver3")
LIBRARY = Library("int8", "the int8 kernels", (Path(__file__).with_name("csrc") / "winograd8.cpp",), FLAGS)
NEEDS = {"avx2", "fma"}
# The kernel takes this many channels at a time.
CHANNEL_BLOCK = 16
# Sums of products have to stay within 32 bits: 4 x 255 x 127 x 9 for each channel.
MAX_CHANNELS = 1024
# Twice Winograd's G, so that it has no halves; a product has it twice, so results are four times too large.
_G = torch.tensor([[2, 0, 0], [1, 1, 1], [1, -1, 1], [0, 0, 2]], dtype=torch.int32)
QUARTER = 0.25


def why_not() -> str:
    """Why the kernel cannot run here; empty where it can."""
    return lacking(NEEDS, "AVX2")


@cache
def _function() -> Any:
    try:
        function = load(LIBRARY).lockstep_winograd8
    except CannotBuild as error:
        raise InputError(f"--engine winograd: {error}") from None
    function.argtypes = [ctypes.c_void_p] * 6
    return function


def can_compute(spec: LayerSpec, integers: bool) -> bool:
    """3x3 with stride 1 and padding 0 or 1, channels in multiples of 16, bytes in and bytes out."""
    if not (spec.conv and integers and spec.weight.shape[2:] == (3, 3)):
        return False
    out_channels, in_channels = spec.weight.shape[:2]
    stride, padding, dilation, groups = spec.arguments
    return (
        (stride, dilation, groups) == ([1, 1], [1, 1], 1)
        and padding in ([0, 0], [1, 1])
        and not out_channels % CHANNEL_BLOCK
        and not in_channels % CHANNEL_BLOCK
        and in_channels <= MAX_CHANNELS
    )


def transformed(weight: Tensor) -> Tensor:
    """The weights in the order in which the kernel reads them: out_channels / 16, position, in_channels / 2, 16 out_channels, 2 in_channels."""
    out_channels, in_channels = weight.shape[:2]
    products = torch.einsum("ij,ocjk,lk->ocil", _G, weight.to(torch.int32), _G)
    parts = products.to(torch.int16).view(out_channels // CHANNEL_BLOCK, CHANNEL_BLOCK, in_channels // 2, 2, 16)
    return parts.permute(0, 4, 2, 1, 3).contiguous()


class WinogradConv(nn.Module):
    """Convolution, ReLU and rounding in one call; with `pool` also a max-pool by two."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        assert spec.source is not None
        assert spec.result is not None
        self._function = _function()
        self._weight = transformed(spec.weight)
        self.out_channels, self.in_channels = spec.weight.shape[:2]
        factors, self._offsets = rounding(spec, spec.source, spec.result)
        self._factors = QUARTER * factors
        self._padding, self.pool = spec.arguments[1][0], False
        zero, (_, result_zero, top) = spec.source.zero, spec.result
        self._ends = (zero, result_zero, result_zero if spec.relu else 0, top)

    def forward(self, values: Tensor) -> Tensor:
        values = values.contiguous(memory_format=torch.channels_last)
        batch, in_channels, height, width = values.shape
        assert in_channels == self.in_channels
        assert values.dtype == torch.uint8
        out_height, out_width = (side + 2 * self._padding - 2 for side in (height, width))
        # With an odd side, the last row or column is in no pool's window: the pool is then a call of its own.
        pool = self.pool and not (out_height % 2 or out_width % 2)
        size = (out_height // 2, out_width // 2) if pool else (out_height, out_width)
        result = torch.empty((batch, self.out_channels, *size), dtype=torch.uint8, memory_format=torch.channels_last)
        threads = torch.get_num_threads()
        fields = (batch, height, width, in_channels, self.out_channels, self._padding, *self._ends, pool, threads)
        pointers = (each.data_ptr() for each in (values, self._weight, self._factors, self._offsets, result))
        if batch and self._function((ctypes.c_int64 * len(fields))(*fields), *pointers):
            raise RuntimeError("int8 convolution: not enough memory for its scratch space")
        if self.pool and not pool:
            result = quantized.max_pool2d(result, *POOL_BY_TWO)
        return result


class WinogradKernels(OneDnnKernels):
    @staticmethod
    def layer(spec: LayerSpec, integers: bool) -> nn.Module:
        return WinogradConv(spec) if can_compute(spec, integers) else OneDnnKernels.layer(spec, integers)

    @staticmethod
    def takes_pool(layer: nn.Module, arguments: list[Any]) -> bool:
        if isinstance(layer, WinogradConv) and pool_arguments(arguments) == POOL_BY_TWO:
            layer.pool = True
            return True
        return False
