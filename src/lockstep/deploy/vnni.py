"""Lockstep's own int8 convolutions and linear layers for CPUs with AVX512-VNNI (csrc/vnni8.cpp, compiled on first use); oneDNN's kernels for other
layers.

PyTorch's way to oneDNN's kernels takes about 25 µs a layer, whatever its size: a sixth of document A's net at batch 1. These take 5.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from lockstep.deploy.kernels import POOL_BY_TWO, LayerSpec, OneDnnKernels, lacking, pool_arguments, rounding
from lockstep.errors import InputError
from lockstep.machine.native_code import CannotBuild, Library, load
from lockstep.quantize.scheme import Numbers, input_integers
from lockstep.torch_private import quantized

WIDE = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vnni", "-mfma")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", *WIDE)
LIBRARY = Library("vnni", "the int8 kernels", (Path(__file__).with_name("csrc") / "vnni8.cpp",), FLAGS)
NEEDS = {"avx512f", "avx512bw", "avx512vl", "avx512_vnni", "fma"}
# Output channels of a vector and of those that are made together; input channels that one instruction adds up.
LANES, PANEL, GROUP = 16, 32, 4
# Sums have to stay within 32 bits: 255 x 127 for each product.
MOST_PRODUCTS = 1 << 16


def why_not() -> str:
    """Why the kernels cannot run here; empty where they can."""
    return lacking(NEEDS, "AVX512-VNNI")


@cache
def _functions() -> tuple[Any, Any]:
    try:
        return functions_of(load(LIBRARY))
    except CannotBuild as error:
        raise InputError(f"--engine vnni: {error}") from None


def functions_of(library: ctypes.CDLL) -> tuple[Any, Any]:
    """A layer, and images as bytes."""
    layer, as_bytes, pointer = library.lockstep_vnni8, library.lockstep_bytes8, ctypes.c_void_p
    layer.argtypes = [pointer] * 7
    as_bytes.argtypes = [pointer, pointer, ctypes.c_float, ctypes.c_int32, ctypes.c_int32, pointer]
    as_bytes.restype = None
    return layer, as_bytes


def can_compute(spec: LayerSpec) -> bool:
    """Linear layers, and convolutions with stride 1, whose input has a known range."""
    if spec.source is None or spec.weight[0].numel() > MOST_PRODUCTS:
        return False
    if not spec.conv:
        return True
    stride, padding, dilation, groups = spec.arguments
    kernel = spec.weight.shape[2]
    return (
        (stride, dilation, groups) == ([1, 1], [1, 1], 1)
        and spec.weight.shape[3] == kernel
        and padding[0] == padding[1]
        and 0 <= padding[0] < kernel
    )


def packed(weight: Tensor) -> Tensor:
    """The weights in the order in which the kernel reads them: panel, tap, in_channels / 4, out_channels of the panel, 4 in_channels."""
    out_channels, in_channels = weight.shape[:2]
    full = pad(weight, (0, 0, 0, 0, 0, -in_channels % GROUP, 0, -out_channels % LANES))
    taps = full.permute(2, 3, 1, 0).flatten(0, 1)  # tap, in_channels, out_channels
    groups = taps.reshape(len(taps), -1, GROUP, taps.shape[2]).transpose(2, 3)
    return torch.cat([groups[:, :, at : at + PANEL].flatten() for at in range(0, groups.shape[2], PANEL)])


class VnniLayer(nn.Module):
    """Layer, ReLU and rounding in one call; with `pool` also a max-pool by two."""

    def __init__(self, spec: LayerSpec, integers: bool) -> None:
        super().__init__()
        assert spec.source is not None
        self._function, self._conv, self.pool = _functions()[0], spec.conv, False
        weight = spec.weight if spec.conv else spec.weight[:, :, None, None]
        self.out_channels, self.in_channels, self._kernel, _ = weight.shape
        self._padding = spec.arguments[1][0] if spec.conv else 0
        result = spec.result if integers else None
        self._kind = torch.float32 if result is None else torch.uint8
        wider = -self.out_channels % LANES
        factors, offsets = rounding(spec, spec.source, result)
        starts = -spec.source.zero * weight.flatten(1).sum(1, dtype=torch.int32)
        self._weight = packed(weight)
        self._starts, self._factors, self._offsets = (pad(each, (0, wider)) for each in (starts, factors, offsets))
        result_zero, top = (result.zero, result.top) if result else (0, 0)
        lowest = result_zero if spec.relu else 0
        self._ends = (spec.source.zero, result_zero, lowest, top)
        self._floats, self._relu = result is None, spec.relu
        self._prepared: dict[tuple[torch.Size, int], tuple[Any, Tensor, bool]] = {}
        self._pointers = tuple(x.data_ptr() for x in (self._weight, self._starts, self._factors, self._offsets))

    def forward(self, values: Tensor) -> Tensor:
        values = values.contiguous(memory_format=torch.channels_last if self._conv else torch.contiguous_format)
        assert values.dtype == torch.uint8
        key = values.shape, torch.get_num_threads()
        if key not in self._prepared:
            self._prepared[key] = self._prepare(*key)
        fields, like, pool = self._prepared[key]
        result = torch.empty_strided(like.shape, like.stride(), dtype=self._kind)
        if result.numel() and self._function(fields, values.data_ptr(), *self._pointers, result.data_ptr()):
            raise RuntimeError("int8 layer: not enough memory for the copy of an image")
        return quantized.max_pool2d(result, *POOL_BY_TWO) if self.pool and not pool else result

    def _prepare(self, shape: torch.Size, threads: int) -> tuple[Any, Tensor, bool]:
        """What the compiled code is told, a tensor like the result without memory, and whether it has the pool in it."""
        if self._conv:
            batch, channels, height, width = shape
            sides = [side + 2 * self._padding - self._kernel + 1 for side in (height, width)]
            # With an odd side, the last row or column is in no pool's window: the pool is then a call of its own.
            pool = self.pool and not (sides[0] % 2 or sides[1] % 2)
            size = (batch, self.out_channels, *(side // 2 if pool else side for side in sides))
            plane = (batch, height, width)
        else:
            channels, pool, size = shape[-1], False, (*shape[:-1], self.out_channels)
            plane = (1, 1, shape.numel() // channels)
        assert channels == self.in_channels
        assert min(size[1:]) > 0
        sizes = (*plane, channels, self.out_channels, self._kernel, self._padding)
        fields = (*sizes, *self._ends, pool, self._floats, self._relu, threads)
        order = torch.channels_last if self._conv else torch.contiguous_format
        like = torch.empty(size, dtype=self._kind, device="meta", memory_format=order)
        return (ctypes.c_int64 * len(fields))(*fields), like, pool


class VnniBytes(nn.Module):
    """Images as bytes, and channels-last, in one pass."""

    def __init__(self, numbers: Numbers) -> None:
        super().__init__()
        self._numbers, self._function = numbers, _functions()[1]

    def forward(self, values: Tensor) -> Tensor:
        if values.dim() != 4 or values.dtype != torch.float32:
            return input_integers(values, self._numbers)
        values, (scale, zero, top) = values.contiguous(), self._numbers
        batch, channels, height, width = values.shape
        result = torch.empty(values.shape, dtype=torch.uint8, memory_format=torch.channels_last)
        sizes = (ctypes.c_int64 * 4)(batch, channels, height * width, torch.get_num_threads())
        self._function(sizes, values.data_ptr(), 1.0 / scale, zero, top, result.data_ptr())
        return result


class VnniKernels(OneDnnKernels):
    @staticmethod
    def layer(spec: LayerSpec, integers: bool) -> nn.Module:
        return VnniLayer(spec, integers) if can_compute(spec) else OneDnnKernels.layer(spec, integers)

    @staticmethod
    def quantize(numbers: Numbers) -> nn.Module:
        return VnniBytes(numbers)

    @staticmethod
    def takes_pool(layer: nn.Module, arguments: list[Any]) -> bool:
        if isinstance(layer, VnniLayer) and pool_arguments(arguments) == POOL_BY_TWO:
            layer.pool = True
            return True
        return False
