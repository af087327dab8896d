"""Fused layers in a row, and the linear layer behind them, as one step of autograd's graph.

In a net of a few thousand weights the kernels take half of a step, and Python around each layer the other half. All gradients of a chain come
at its end, so it is for nets whose gradients go in one message anyway: of a larger one the exchange begins while the backward pass goes on.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.kernels import dispatch, native, op
from lockstep.kernels.module import FusedConvReLU, is_simple
from lockstep.kernels.way import Way
from lockstep.placement import FIRST_BUCKET_BYTES
from lockstep.torch_private import children, has_hooks, own_parameters

MOST_BYTES = FIRST_BUCKET_BYTES
"""Of all weights."""
MOST_PRODUCTS, MOST_OUTPUTS = 1 << 19, 16
"""A linear layer with more is PyTorch's library's; a smaller one is done when that has hardly begun."""


def join(sequence: nn.Sequential) -> None:
    """Make it a chain, if it is worth it: in place, so that its name, its hooks and its parameters stay."""
    parts = _parts(tuple(sequence))
    size = sum(p.numel() * p.element_size() for p in sequence.parameters())
    if type(sequence) is nn.Sequential and len(parts.layers) + len(parts.linear) > 1 and size <= MOST_BYTES:
        sequence.__class__ = Chain


class Chain(nn.Sequential):
    """A Sequential that begins with fused layers. Whatever it cannot compute in one go (another type, a hook within, a graph that is being
    compiled, a layer that PyTorch's operators are faster at), it computes layer by layer."""

    _known: _Parts | None = None

    def forward(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # before anything is kept, which would be another function to compile
            return self._one_by_one(input)
        modules = children(self)
        parts = self._known
        if parts is None or parts.modules != modules:
            parts = self._known = _parts(modules)
        # This runs in each step of nets that take half a millisecond.
        parameters = [each for layer in parts.layers + parts.linear for each in own_parameters(layer)]
        plan = _plan_for(input, parts, parameters)
        if plan is None:
            return self._one_by_one(input)
        if plan.learns:
            y: Tensor = _ChainFunction.apply(input, plan, *parameters)  # type: ignore[no-untyped-call]
        else:
            y = _forward(input, plan, parameters)[-1]  # type: ignore[arg-type]
        for module in parts.rest:
            y = module(y)
        return y

    def _one_by_one(self, input: Tensor) -> Tensor:
        result: Tensor = super().forward(input)  # type: ignore[no-untyped-call]
        return result


class _Parts(NamedTuple):
    """What a Sequential consists of: the fused layers that it begins with, the linear layer that may follow them, and what is behind."""

    modules: tuple[nn.Module, ...]
    layers: tuple[FusedConvReLU, ...]
    linear: tuple[nn.Linear, ...]
    rest: tuple[nn.Module, ...]


def _parts(modules: tuple[nn.Module, ...]) -> _Parts:
    layers: list[FusedConvReLU] = []
    for place, module in enumerate(modules):
        if type(module) is FusedConvReLU:
            layers.append(module)
        elif type(module) is not nn.Identity:
            flatten, linear = (*modules[place : place + 2], None)[:2]
            if type(flatten) is nn.Flatten and type(linear) is nn.Linear and _is_usual(flatten):
                return _Parts(modules, tuple(layers), (linear,), modules[place + 2 :])
            return _Parts(modules, tuple(layers), (), modules[place:])
    return _Parts(modules, tuple(layers), (), ())


def _is_usual(flatten: nn.Flatten) -> bool:
    return (flatten.start_dim, flatten.end_dim) == (1, -1) and not has_hooks(flatten)


class _Link(NamedTuple):
    """One layer, for operands of known sizes."""

    values: Any
    """What the compiled code is told, forward and backward."""
    values_back: Any
    size: tuple[int, ...]
    order: torch.memory_format
    padding: int
    pool: bool


class _Plan(NamedTuple):
    links: tuple[_Link, ...]
    linear: bool
    learns: bool
    small: Any
    """What the compiled code is told of a small linear layer; None where PyTorch computes it."""


Sizes = tuple[torch.Size, tuple[int, ...]]
"""And strides."""


def _plan_for(x: Tensor, parts: _Parts, parameters: Sequence[Tensor | None]) -> _Plan | None:
    """None where the layers have to be computed one by one."""
    if type(x) is not Tensor or x.dim() != 4 or not x.is_cpu or x.dtype is not torch.float32 or x.is_neg():
        return None
    if torch.is_autocast_enabled("cpu"):
        return None
    learns = torch.is_grad_enabled()
    for parameter in parameters:
        if type(parameter) is not nn.Parameter or parameter.dtype is not torch.float32 or not parameter.is_cpu:
            return None
        if learns and not parameter.requires_grad:
            return None
    settings = []
    for layer in parts.layers:
        if has_hooks(layer) or not is_simple(layer):
            return None
        settings.append((layer.padding[0], layer.pool))
    if parts.linear and has_hooks(parts.linear[0]):
        return None
    sizes = tuple([(p.shape, p.stride()) for p in parameters if p is not None])
    images = (x.shape, x.stride(), learns and x.requires_grad)
    return _plan(images, sizes, tuple(settings), torch.get_num_threads(), learns)


@lru_cache(maxsize=256)
def _plan(
    images: tuple[torch.Size, tuple[int, ...], bool],
    sizes: tuple[Sizes, ...],
    settings: tuple[tuple[int, bool], ...],
    threads: int,
    learns: bool,
) -> _Plan | None:
    size, strides, grad_x = images
    last = _last_order(size, strides)
    orders = [_last_order(*each) for each in sizes]
    if native.load() is None or size.numel() == 0 or last is None or None in orders:
        return None
    links = []
    for number, (padding, pool) in enumerate(settings):
        weight, weight_strides = sizes[2 * number]
        if size[1] != weight[1]:
            return None  # PyTorch's operator says what is wrong
        wants_x = learns and (number > 0 or grad_x)
        layer = dispatch.layer_of(size, weight, padding, pool, last, torch.float32, threads, learns, wants_x)
        ways = dispatch.choose(layer)
        if ways is None or Way.TORCH in ways:
            return None
        forward, backward = (
            native.values(size, weight, weight_strides, torch.float32, padding, pool, way is Way.WINOGRAD, last)
            for way in ways
        )
        order = torch.channels_last if last else torch.contiguous_format
        size = torch.Size(forward[1])
        links.append(_Link(forward[0], backward[0], size, order, padding, pool))
        # What comes out may lie in both orders at once, if it has one channel or one pixel: then it counts as planar everywhere.
        last = bool(_last_order(size, torch.empty(size, device="meta", memory_format=order).stride()))
    linear = len(sizes) > 2 * len(settings)
    return _Plan(tuple(links), linear, learns, _small(size, last, *sizes[-2]) if linear else None)


def _small(images: torch.Size, last: bool, weight: torch.Size, strides: tuple[int, ...]) -> Any:
    """Sizes of the product, if it is small, and its operands lie as they are read: images in planes, weights in rows."""
    rows, inputs, outputs = images[0], images[1:].numel(), weight[0]
    if last or weight[1] != inputs or strides != (inputs, 1):
        return None
    if outputs > MOST_OUTPUTS or rows * inputs * outputs > MOST_PRODUCTS:
        return None
    return (ctypes.c_int64 * 3)(rows, inputs, outputs)


def _last_order(size: torch.Size, strides: tuple[int, ...]) -> bool | None:
    """Whether it is channels-last, as native.last_order sees it; None for neither."""
    tensor = torch.empty_strided(size, strides, device="meta")
    return native.last_order(tensor) or (False if tensor.is_contiguous() else None)


def _forward(x: Tensor, plan: _Plan, parameters: Sequence[Tensor]) -> list[Tensor]:
    """x, then of each layer what its backward pass needs and its result, then the linear layer's input and result."""
    kernels = native.load()
    assert kernels is not None
    found = [x]
    for number, link in enumerate(plan.links):
        weight, bias = parameters[2 * number], parameters[2 * number + 1]
        y = torch.empty(link.size, memory_format=link.order)
        code = torch.empty(link.size, dtype=torch.uint8, memory_format=link.order) if link.pool else y
        if not kernels.forward_into(link.values, x, weight, bias, y, code if link.pool and plan.learns else None):
            y, slow = op.forward(x, weight, bias, link.padding, link.pool, Way.TORCH, plan.learns)
            y = y.contiguous(memory_format=link.order)
            code = y if slow is None else slow.contiguous(memory_format=link.order)
        found += [code, y]
        x = y
    if plan.small:
        y = torch.empty(len(x), len(parameters[-1]))
        kernels.linear_into(plan.small, x, parameters[-2], parameters[-1], y)
        found += [x, y]
    elif plan.linear:
        flat = x.flatten(1)
        found += [flat, torch.addmm(parameters[-1], flat, parameters[-2].t())]
    return found


class _ChainFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: _Plan, *parameters: Tensor) -> Tensor:
        found = _forward(x, plan, parameters)
        result = found[-1]
        ctx.plan = plan
        # The last result is kept where it is a layer's that has no pool: the mask is in it.
        ctx.save_for_backward(*(found[:-1] if plan.linear else found), *parameters)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("FusedConvReLU has no second derivative: use torch.nn.Conv2d and torch.nn.ReLU")
        plan: _Plan = ctx.plan
        kernels = native.load()
        assert kernels is not None
        tensors = ctx.saved_tensors
        count = 2 * len(plan.links) + 1
        kept, parameters = tensors[:count], tensors[count + plan.linear :]
        gradients: list[Tensor | None] = []
        if plan.small:
            weight, x = parameters[-2], kept[-1]
            grad, gradients = grad.contiguous(), [torch.empty_like(weight), torch.empty_like(parameters[-1])]
            grad_x = torch.empty(x.shape)
            kernels.linear_back_into(plan.small, grad, x, weight, grad_x, *gradients)  # type: ignore[arg-type]
            grad = grad_x
        elif plan.linear:
            gradients = [grad.t() @ tensors[count], grad.sum(0)]
            grad = (grad @ parameters[-2]).view(kept[-1].shape)
        below: Tensor | None = grad
        for number in reversed(range(len(plan.links))):
            link, weight = plan.links[number], parameters[2 * number]
            x, code = kept[2 * number], kept[2 * number + 1]
            assert below is not None
            grad = below.contiguous(memory_format=link.order)
            wants_x = number > 0 or ctx.needs_input_grad[0]
            below = torch.empty(x.shape, memory_format=link.order) if wants_x else None
            grad_weight = torch.empty_strided(weight.shape, weight.stride())
            grad_bias = torch.empty(link.size[1])
            if not kernels.backward_into(link.values_back, grad, code, x, weight, below, grad_weight, grad_bias):
                below, grad_weight, grad_bias = op.backward(
                    grad, x, weight, code, link.padding, link.pool, Way.TORCH, wants_x
                )
            gradients = [grad_weight, grad_bias, *gradients]
        return (below, None, *gradients)
