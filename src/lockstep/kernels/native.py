"""The compiled kernels, called on tensors: outputs are made here, everything else happens in C++."""

from __future__ import annotations

import ctypes
import warnings
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels import build, dispatch
from lockstep.kernels.dispatch import Way

DONE, NOT_TAME, NO_MEMORY = range(3)


@cache
def load(double: bool = False) -> Native | None:
    """The kernels, compiled now if need be; None, after one warning, where that cannot be done."""
    try:
        return Native("double" if double else build.best_target())
    except (build.CannotBuild, OSError) as error:
        warnings.warn(f"FusedConvReLU computes with PyTorch's own operators: {error}", stacklevel=3)
        return None


class Native:
    """The functions of one library."""

    def __init__(self, isa: str, library: Path | None = None) -> None:
        """`library`: another than that which is built for this instruction set."""
        self.isa = isa
        functions = ctypes.CDLL(str(library or build.library(isa)))
        self._forward, self._backward = functions.lockstep_forward, functions.lockstep_backward
        self._forward.argtypes, self._backward.argtypes = [ctypes.c_void_p] * 6, [ctypes.c_void_p] * 8

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, padding: int, pool: bool, winograd: bool, keep: bool
    ) -> tuple[Tensor, Tensor | None] | None:
        """Result and code (what the way back of a pool needs); None where the numbers are too large, or not numbers."""
        x, last = _in_order(x)
        if weight.dtype is torch.bfloat16:
            weight, bias = weight.float(), None if bias is None else bias.float()
        numbers, size = _numbers(x.shape, weight.shape, weight.stride(), x.dtype, padding, pool, winograd, last)
        layout = torch.channels_last if last else torch.contiguous_format
        y = torch.empty(size, dtype=x.dtype, memory_format=layout)
        code = torch.empty(size, dtype=torch.uint8, memory_format=layout) if pool and keep else None
        if size[0] == 0:
            return y, code
        bias = None if bias is None else bias.contiguous()
        answer = self._forward(
            numbers,
            x.data_ptr(),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            None if code is None else code.data_ptr(),
        )
        return (y, code) if _done(answer) else None

    def backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, kept: Tensor, padding: int, pool: bool, winograd: bool, wants_x: bool
    ) -> tuple[Tensor | None, Tensor, Tensor] | None:
        """The gradients of x (if it is wanted), weight and bias; `kept` is y, or with a pool its code."""
        x, last = _in_order(x)
        layout = torch.channels_last if last else torch.contiguous_format
        grad, kept = grad.contiguous(memory_format=layout), kept.contiguous(memory_format=layout)
        weights = weight.float() if weight.dtype is torch.bfloat16 else weight
        numbers, size = _numbers(x.shape, weights.shape, weights.stride(), x.dtype, padding, pool, winograd, last)
        grad_x = torch.empty_like(x) if wants_x else None
        grad_weight, grad_bias = torch.empty_like(weights), torch.empty(size[1], dtype=weights.dtype)
        if size[0] == 0:
            return grad_x, grad_weight.zero_().to(weight.dtype), grad_bias.zero_().to(weight.dtype)
        answer = self._backward(
            numbers,
            grad.data_ptr(),
            kept.data_ptr(),
            x.data_ptr(),
            weights.data_ptr(),
            None if grad_x is None else grad_x.data_ptr(),
            grad_weight.data_ptr(),
            grad_bias.data_ptr(),
        )
        if not _done(answer):
            return None
        if weights is not weight:
            grad_weight, grad_bias = grad_weight.to(weight.dtype), grad_bias.to(weight.dtype)
        return grad_x, grad_weight, grad_bias


def last_order(x: Tensor) -> bool:
    """Whether an image tensor counts as channels-last; one that is both, or neither, does not."""
    return not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


def _in_order(x: Tensor) -> tuple[Tensor, bool]:
    """The image tensor without gaps, and whether it is channels-last."""
    if x.is_contiguous():
        return x, False
    if x.is_contiguous(memory_format=torch.channels_last):
        return x, True
    return x.contiguous(), False


def _done(answer: int) -> bool:
    if answer == NO_MEMORY:
        raise RuntimeError("FusedConvReLU: not enough memory for its scratch space")
    return bool(answer == DONE)


@lru_cache(maxsize=1024)
def _numbers(
    x: torch.Size,
    weight: torch.Size,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    padding: int,
    pool: bool,
    winograd: bool,
    last: bool,
) -> tuple[Any, tuple[int, ...]]:
    """What `Job` in csrc/glue.cpp reads, and the size of the result; checked, since the compiled code relies on it."""
    check(x, weight, padding, pool, winograd, dtype)
    batch, channels, height, width = x
    kernel = weight[2]
    sizes = (batch, channels, weight[0], height, width, kernel, padding)
    flags = (pool, last, dtype is torch.bfloat16)
    words = (winograd, *sizes, *flags, *strides)
    halves = 2 if pool else 1
    result = tuple((side + 2 * padding - kernel + 1) // halves for side in (height, width))
    return (ctypes.c_int64 * len(words))(*words), (batch, weight[0], *result)


def check(
    x: torch.Size, weight: torch.Size, padding: int, pool: bool, winograd: bool, dtype: torch.dtype
) -> None:
    """The module never asks for anything else; others get words instead of a crash."""
    if len(x) != 4 or len(weight) != 4 or x[1] != weight[1] or weight[2] != weight[3]:
        raise RuntimeError(f"conv_relu: input {tuple(x)} and weight {tuple(weight)} do not go together")
    kernel, least = weight[2], 2 if pool else 1
    if min(x[2:]) + 2 * padding - kernel + 1 < least or not 0 <= padding < kernel:
        raise RuntimeError(f"conv_relu: a {kernel}x{kernel} kernel with padding {padding} does not fit input {tuple(x)}")
    way = Way.WINOGRAD if winograd else Way.DIRECT
    if way not in dispatch.possible(x[1], weight[0], kernel, padding, dtype):
        raise RuntimeError(f"conv_relu: {way.name.lower()} does not compute {tuple(weight)} weights in {dtype}")
