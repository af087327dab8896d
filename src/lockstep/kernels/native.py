"""The compiled kernels, called on tensors: outputs are made here, everything else happens in C++."""

from __future__ import annotations

import ctypes
import warnings
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels import build, trial
from lockstep.kernels.way import Tail, Way, possible, result_size
from lockstep.machine.native_code import CannotBuild
from lockstep.machine.native_code import load as load_library

# What the compiled functions answer (csrc/glue.cpp).
DONE, NOT_FINITE, NO_MEMORY = range(3)


@cache
def load(double: bool = False) -> Native | None:
    """The kernels, compiled now if need be; None, after one warning, where that cannot be done."""
    found = _found(double)
    if isinstance(found, Native):
        return found
    warnings.warn(f"FusedConvReLU computes with PyTorch's own operators: {found}", stacklevel=3)
    return None


def problem() -> str | None:
    """Why there are no kernels here, in one line."""
    found = _found(False)
    return None if isinstance(found, Native) else found


@cache
def _found(double: bool) -> Native | str:
    try:
        return Native("double" if double else trial.best_target())
    except CannotBuild as error:
        return str(error)


class Native:
    """The functions of one library."""

    def __init__(self, isa: str, library: Path | None = None) -> None:
        """`library`: another than that which is built for this instruction set."""
        self.isa = isa
        functions = ctypes.CDLL(str(library)) if library else load_library(build.sources_for(isa))
        self._forward, self._backward = functions.lockstep_forward, functions.lockstep_backward
        self._forward.argtypes, self._backward.argtypes = [ctypes.c_void_p] * 6, [ctypes.c_void_p] * 8
        self._linear, self._linear_back = functions.lockstep_linear_forward, functions.lockstep_linear_backward
        self._linear.argtypes, self._linear_back.argtypes = [ctypes.c_void_p] * 5, [ctypes.c_void_p] * 7
        self._linear.restype = self._linear_back.restype = None

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, padding: int, tail: int, winograd: bool, keep: bool
    ) -> tuple[Tensor, Tensor | None] | None:
        """Result and code (which the backward pass of a pool needs); None if a number is too large or not finite."""
        _must_agree(x, weight, bias)
        x, last = _images(x)
        weight = _weights(weight)
        told, size = values(x.shape, weight.shape, weight.stride(), x.dtype, padding, tail, winograd, last)
        y = torch.empty(size, dtype=x.dtype, memory_format=_ORDER[last])
        code = (
            torch.empty(size, dtype=torch.uint8, memory_format=_ORDER[last])
            if keep and tail == Tail.RELU_POOL
            else None
        )
        if size[0] == 0:
            return y, code
        bias = None if bias is None else _in_memory(bias.to(weight.dtype))
        return (y, code) if self.forward_into(told, x, weight, bias, y, code) else None

    def backward(
        self,
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        kept: Tensor | None,
        padding: int,
        tail: int,
        winograd: bool,
        wants_x: bool,
    ) -> tuple[Tensor | None, Tensor, Tensor] | None:
        """The gradients of x (if it is wanted), weight and bias; `kept` is y, with a pool its code, or None without a ReLU."""
        _must_agree(x, weight, None)
        x, last = _images(x)
        weights = _weights(weight)
        told, size = values(x.shape, weights.shape, weights.stride(), x.dtype, padding, tail, winograd, last)
        _must_be(grad, "gradient", size, x.dtype)
        grad = _in_memory(grad, _ORDER[last])
        if kept is not None:
            _must_be(kept, "kept", size, torch.uint8 if tail == Tail.RELU_POOL else x.dtype)
            kept = _in_memory(kept, _ORDER[last])
        elif tail != Tail.NOTHING:
            raise RuntimeError("conv_relu: kept is missing")
        grad_x = torch.empty(x.shape, dtype=x.dtype, memory_format=_ORDER[last]) if wants_x else None
        # It lies as `weights` does, whose strides the compiled code was told: stated here, not left to `empty_like` to repeat.
        grad_weight = torch.empty_strided(weights.shape, weights.stride(), dtype=weights.dtype)
        grad_bias = torch.empty(size[1], dtype=weights.dtype)
        if size[0] == 0:
            return grad_x, grad_weight.zero_().to(weight.dtype), grad_bias.zero_().to(weight.dtype)
        if not self.backward_into(told, grad, kept, x, weights, grad_x, grad_weight, grad_bias):
            return None
        return grad_x, grad_weight.to(weight.dtype), grad_bias.to(weight.dtype)

    # For who has seen to sizes, types and strides: these believe all that they are told. False where a number is too large.

    def forward_into(
        self, told: Any, x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, code: Tensor | None
    ) -> bool:
        answer = self._forward(
            told,
            x.data_ptr(),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            None if code is None else code.data_ptr(),
        )
        return _done(answer)

    def backward_into(
        self,
        told: Any,
        grad: Tensor,
        kept: Tensor | None,
        x: Tensor,
        weight: Tensor,
        grad_x: Tensor | None,
        grad_weight: Tensor,
        grad_bias: Tensor,
    ) -> bool:
        answer = self._backward(
            told,
            grad.data_ptr(),
            None if kept is None else kept.data_ptr(),
            x.data_ptr(),
            weight.data_ptr(),
            None if grad_x is None else grad_x.data_ptr(),
            grad_weight.data_ptr(),
            grad_bias.data_ptr(),
        )
        return _done(answer)

    def linear_into(self, sizes: Any, x: Tensor, weight: Tensor, bias: Tensor, y: Tensor) -> None:
        self._linear(sizes, x.data_ptr(), weight.data_ptr(), bias.data_ptr(), y.data_ptr())

    def linear_back_into(
        self,
        sizes: Any,
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        grad_x: Tensor,
        grad_weight: Tensor,
        grad_bias: Tensor,
    ) -> None:
        self._linear_back(
            sizes,
            grad.data_ptr(),
            x.data_ptr(),
            weight.data_ptr(),
            grad_x.data_ptr(),
            grad_weight.data_ptr(),
            grad_bias.data_ptr(),
        )


# What the compiled code is given passes through the functions below, and only through them: it reads and writes by pointers, and
# believes what it is told of sizes, types and strides.

_ORDER = {False: torch.contiguous_format, True: torch.channels_last}


def _in_memory(tensor: Tensor, order: torch.memory_format = torch.contiguous_format) -> Tensor:
    """The tensor in this memory order, without gaps, overlaps or a pending negation; a copy only where it is needed."""
    # A view such as `z.conj().imag` has its numbers in memory with the other sign, and a mark that says so.
    return (tensor.resolve_neg() if tensor.is_neg() else tensor).contiguous(memory_format=order)


def _images(x: Tensor) -> tuple[Tensor, bool]:
    """The images in one of two orders, and whether it is channels-last."""
    last = last_order(x)
    return _in_memory(x, _ORDER[last]), last


def _weights(weight: Tensor) -> Tensor:
    """The weights in either order, in the type that the kernels compute in."""
    return _in_memory(weight.float() if weight.dtype is torch.bfloat16 else weight, _ORDER[last_order(weight)])


def _must_agree(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """What the shapes alone do not say; those are looked at in `check`."""
    _must_be(weight, "weight", weight.shape, x.dtype)
    if bias is not None:
        _must_be(bias, "bias", weight.shape[:1], x.dtype)
    if not x.is_cpu or x.layout is not torch.strided:
        raise RuntimeError(
            f"conv_relu: the input is a {x.layout} tensor on {x.device}, and should be a dense one on the CPU"
        )


def _must_be(tensor: Tensor, name: str, size: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor.shape != size or tensor.dtype is not dtype or not tensor.is_cpu or tensor.layout is not torch.strided:
        found = f"{tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}"
        raise RuntimeError(f"conv_relu: {name} is {found}, and should be {tuple(size)} of {dtype} on the CPU")


def last_order(x: Tensor) -> bool:
    """Whether an image tensor counts as channels-last; one that is both, or neither, does not."""
    return not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


def _done(answer: int) -> bool:
    if answer == NO_MEMORY:
        raise RuntimeError("FusedConvReLU: not enough memory for its scratch space")
    return answer != NOT_FINITE


@lru_cache(maxsize=1024)
def values(
    x: torch.Size,
    weight: torch.Size,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    padding: int,
    tail: int,
    winograd: bool,
    last: bool,
) -> tuple[Any, tuple[int, ...]]:
    """What `Job` in csrc/glue.cpp reads, and the size of the result; checked, since the compiled code relies on it."""
    check(x, weight, padding, tail, winograd, dtype)
    batch, channels, height, width = x
    sizes = (batch, channels, weight[0], height, width, weight[2], padding)
    flags = (tail != Tail.NOTHING, tail == Tail.RELU_POOL, last, dtype is torch.bfloat16)
    words = (winograd, *sizes, *flags, *strides)
    return (ctypes.c_int64 * len(words))(*words), (batch, weight[0], *result_size(x, weight, padding, tail))


def check(x: torch.Size, weight: torch.Size, padding: int, tail: int, winograd: bool, dtype: torch.dtype) -> None:
    """The module always passes. A direct call of the operator gets an error message instead of a crash."""
    if len(x) != 4 or len(weight) != 4 or x[1] != weight[1] or weight[2] != weight[3]:
        raise RuntimeError(f"conv_relu: input {tuple(x)} and weight {tuple(weight)} do not go together")
    if 0 in x[1:] or 0 in weight:
        raise RuntimeError(f"conv_relu: input {tuple(x)} or weight {tuple(weight)} is empty")
    kernel = weight[2]
    if min(result_size(x, weight, padding, tail)) < 1 or not 0 <= padding < kernel:
        raise RuntimeError(
            f"conv_relu: a {kernel}x{kernel} kernel with padding {padding} does not fit input {tuple(x)}"
        )
    way = Way.WINOGRAD if winograd else Way.DIRECT
    if way not in possible(x[1], weight[0], kernel, padding, dtype):
        raise RuntimeError(f"conv_relu: {way.name.lower()} does not compute {tuple(weight)} weights in {dtype}")
