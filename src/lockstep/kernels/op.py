"""Convolution, bias, and perhaps ReLU and a 2x2 max-pool as one operation with a gradient, by the ways that are asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lockstep.kernels import native
from lockstep.kernels.way import Tail, Way, result_size
from lockstep.torch_private import convolution_backward, threshold_backward

CUT_OFF = 4
"""The code of a pooled number that the ReLU cut off; 0 to 3 say which of four was the largest."""


def fused(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    padding: int = 0,
    tail: int = Tail.RELU,
    forward: int = Way.DIRECT,
    backward: int | None = None,
) -> Tensor:
    """By the stated ways, whatever was measured. There has to be a compiler."""
    device = "cpu" if x.is_cpu else x.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    ways = int(forward), int(forward if backward is None else backward)
    if not learns(x, weight, bias):  # asked here: inside of the function below gradients are always off
        inferred: Tensor = _operator("forward", x)(x, weight, bias, padding, tail, ways[0], False)[0]
        return inferred
    result: Tensor = ConvRelu.apply(x, weight, bias, padding, tail, *ways)  # type: ignore[no-untyped-call]
    return result


def learns(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether there will be a backward pass."""
    wanted = x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    return wanted and torch.is_grad_enabled()


def plain(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int | tuple[int, ...],
    padding: str | int | tuple[int, ...],
    dilation: int | tuple[int, ...],
    groups: int,
    tail: int,
) -> Tensor:
    """By PyTorch's own operators. The pool comes before the ReLU: the same numbers for a quarter of the ReLU's work."""
    result = functional.conv2d(x, weight, bias, stride, padding, dilation, groups)
    if tail == Tail.RELU_POOL:
        result = functional.max_pool2d(result, 2)
    return result if tail == Tail.NOTHING else functional.relu(result)


class ConvRelu(torch.autograd.Function):
    """The ReLU's mask comes from the result itself, or from the pool's code: nothing else is kept but x and the weights."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, padding: int, tail: int, way: int, way_back: int
    ) -> Tensor:
        y: Tensor
        y, code = _operator("forward", x)(x, weight, bias, padding, tail, way, True)
        kept = y if tail == Tail.RELU else code if tail == Tail.RELU_POOL else None
        ctx.save_for_backward(x, weight, kept)
        ctx.settings = padding, tail, way_back
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, kept = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        padding, tail, way = ctx.settings
        if torch.is_grad_enabled():  # create_graph=True: PyTorch's operators have a second derivative
            if not x.is_cpu or torch.compiler.is_compiling():
                raise RuntimeError("FusedConvReLU has no second derivative here: use torch.nn.Conv2d and torch.nn.ReLU")
            way = Way.TORCH
        grad_x, grad_weight, grad_bias = _operator("backward", x)(grad, x, weight, kept, padding, tail, way, wanted[0])
        return (
            grad_x if wanted[0] else None,
            grad_weight if wanted[1] else None,
            grad_bias if wanted[2] else None,
            *(None, None, None, None),
        )


def _operator(name: str, x: Tensor) -> Callable[..., Any]:
    """On the CPU without PyTorch's dispatcher, which costs more than a small layer; through it while torch.compile traces."""
    if x.is_cpu and not torch.compiler.is_compiling():
        return forward if name == "forward" else backward
    operator: Callable[..., Any] = getattr(torch.ops.lockstep, f"conv_relu_{name}")
    return operator


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, padding: int, tail: int, way: int, keep: bool
) -> tuple[Tensor, Tensor | None]:
    kernels = native.load(x.dtype is torch.float64)
    if way != Way.TORCH and kernels is not None:
        found = kernels.forward(x, weight, bias, padding, tail, way == Way.WINOGRAD, keep)
        if found is not None:
            return found
    output = functional.conv2d(x, weight, bias, padding=padding)
    if tail == Tail.NOTHING:
        return output, None
    pool = tail == Tail.RELU_POOL
    if not (pool and keep):
        return (functional.max_pool2d(output, 2) if pool else output).relu_(), None
    y, index = functional.max_pool2d_with_indices(output, (2, 2))
    row, column = index // output.shape[3], index % output.shape[3]
    code = (row % 2 * 2 + column % 2).to(torch.uint8).masked_fill_(y <= 0, CUT_OFF)
    return y.relu_(), code


def backward(
    grad: Tensor, x: Tensor, weight: Tensor, kept: Tensor | None, padding: int, tail: int, way: int, wants_x: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    kernels = native.load(x.dtype is torch.float64)
    if way != Way.TORCH and kernels is not None:
        found = kernels.backward(grad, x, weight, kept, padding, tail, way == Way.WINOGRAD, wants_x)
        if found is not None:
            return found
    if tail == Tail.NOTHING or kept is None:
        whole = grad
    elif tail == Tail.RELU_POOL:
        height, width = result_size(x.shape, weight.shape, padding, Tail.RELU)
        whole = grad.new_zeros((*grad.shape[:2], height, width))
        for i in range(4):
            part = whole[:, :, i // 2 : height // 2 * 2 : 2, i % 2 : width // 2 * 2 : 2]
            part.copy_(grad.masked_fill(kept != i, 0))
    else:
        whole = threshold_backward(grad, kept, 0)
    sizes, ones = [weight.shape[0]], [1, 1]
    grads: tuple[Tensor | None, Tensor, Tensor] = convolution_backward(
        whole, x, weight, sizes, ones, [padding] * 2, ones, False, [0, 0], 1, [wants_x, True, True]
    )
    return grads


def _fake_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, padding: int, tail: int, way: int, keep: bool
) -> tuple[Tensor, Tensor]:
    layout = torch.channels_last if native.last_order(x) else torch.contiguous_format
    size = (x.shape[0], weight.shape[0], *result_size(x.shape, weight.shape, padding, tail))
    y = torch.empty(size, dtype=x.dtype, device=x.device, memory_format=layout)
    coded = keep and tail == Tail.RELU_POOL
    return y, torch.empty_like(y, dtype=torch.uint8) if coded else x.new_empty((0, 0, 0, 0), dtype=torch.uint8)


def _fake_backward(
    grad: Tensor, x: Tensor, weight: Tensor, kept: Tensor | None, padding: int, tail: int, way: int, wants_x: bool
) -> tuple[Tensor, Tensor, Tensor]:
    layout = torch.channels_last if native.last_order(x) else torch.contiguous_format
    grad_x = torch.empty_like(x, memory_format=layout) if wants_x else x.new_empty(0)
    dense = weight.is_contiguous() or weight.is_contiguous(memory_format=torch.channels_last)
    grad_weight = weight.new_empty_strided(weight.shape, weight.stride()) if dense else weight.new_empty(weight.shape)
    return grad_x, grad_weight, weight.new_empty(weight.shape[0])


def _define() -> None:
    """The same two functions as operators, which torch.compile puts into its graphs without looking inside. What they do on a CPU
    is in dispatch.py, which decides the way where that was left for later."""
    words = "int padding, int tail, int way, bool"
    torch.library.define(
        "lockstep::conv_relu_forward", f"(Tensor x, Tensor weight, Tensor? bias, {words} keep) -> (Tensor, Tensor)"
    )
    torch.library.define(
        "lockstep::conv_relu_backward",
        f"(Tensor grad, Tensor x, Tensor weight, Tensor? kept, {words} wants_x) -> (Tensor, Tensor, Tensor)",
    )
    torch.library.register_fake("lockstep::conv_relu_forward", _fake_forward)
    torch.library.register_fake("lockstep::conv_relu_backward", _fake_backward)


_define()
