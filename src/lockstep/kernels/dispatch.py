"""Which way computes a convolution: ours only where it is faster than PyTorch's operators, in this process, on this machine.

Each layer is timed when it is met first (timing.py), and the times are kept for all processes of this machine (table.py). Graphs of
torch.compile ask when they run, by the same rule: while they are traced, sizes may be symbols that have no times.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lockstep.kernels import native, op, table, timing
from lockstep.kernels.table import PLAIN, Layer, Row
from lockstep.kernels.way import Tail, Way, possible, result_size

# The fused operator has to be faster by this factor: what is within the noise of a measurement is not taken.
MARGIN = 0.97
# Instead of a way: decide when it runs; the second where the gradient of x is wanted too.
LATER, LATER_WITH_X = -1, -2

Ways = tuple[Way, Way]
"""Forward and backward."""
_chosen: dict[tuple[Any, ...], Ways | None] = {}


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int, tail: int) -> Tensor:
    """The fastest way to compute conv2d(x, weight, bias, padding=padding), and what follows it."""
    dtype = _dtype(x, weight, bias)
    if dtype is None or len(possible(weight.shape[1], weight.shape[0], weight.shape[2], padding, dtype)) == 1:
        return op.plain(x, weight, bias, 1, padding, 1, 1, tail)
    if torch.compiler.is_compiling():
        return op.fused(x, weight, bias, padding, tail, LATER_WITH_X if x.requires_grad else LATER)
    ways = _ways(x, weight, bias, padding, tail, dtype)
    if ways is None:
        return op.plain(x, weight, bias, 1, padding, 1, 1, tail)
    return op.fused(x, weight, bias, padding, tail, *ways)


def _dtype(x: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype | None:
    """The number format to compute in. None leaves it to PyTorch's operator, which also says what is wrong with wrong operands."""
    if not (x.is_cpu and weight.is_cpu and x.dim() == 4 and x.shape[1] == weight.shape[1]):
        return None
    if bias is not None and not (bias.is_cpu and bias.shape == weight.shape[:1]):
        return None
    if torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu")
    same = x.dtype == weight.dtype and (bias is None or bias.dtype == x.dtype)
    # float64 is for checking: nothing was done for its speed.
    return x.dtype if same and x.dtype != torch.float64 else None


def _ways(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int, tail: int, dtype: torch.dtype) -> Ways | None:
    if not (_ordinary(x) and _ordinary(weight)) or x.numel() == 0 or native.load() is None:
        return None
    last, threads = native.last_order(x), torch.get_num_threads()
    key = (x.shape, weight.shape, padding, tail, last, dtype, threads, op.learns(x, weight, bias), x.requires_grad)
    if key not in _chosen:
        _chosen[key] = choose(layer_of(*key))
    return _chosen[key]


def layer_of(
    x: tuple[int, ...],
    weight: tuple[int, ...],
    padding: int,
    tail: int,
    channels_last: bool,
    dtype: torch.dtype,
    threads: int,
    learns: bool,
    grad_x: bool,
) -> Layer:
    return Layer(
        batch=table.rounded(x[0]),
        channels=x[1],
        out_channels=weight[0],
        height=x[2],
        width=x[3],
        kernel=weight[2],
        padding=padding,
        relu=tail != Tail.NOTHING,
        pool=tail == Tail.RELU_POOL,
        channels_last=channels_last,
        dtype=str(dtype).removeprefix("torch."),
        threads=threads,
        learns=learns,
        grad_x=learns and grad_x,
    )


def choose(layer: Layer) -> Ways | None:
    """The ways forward and backward; None for PyTorch's operators one after the other."""
    x, weight = (0, 0, layer.height, layer.width), (0, 0, layer.kernel, layer.kernel)
    kernels = native.load()
    if kernels is None or min(result_size(x, weight, layer.padding, layer.tail)) < 1:
        return None  # where nothing comes out, PyTorch's operator says why
    return best(table.find(layer, kernels.isa, timing.measure))


def best(row: Row) -> Ways | None:
    ways = inside(row)
    ours = sum(times[way.name.lower()] for times, way in zip((row.forward, row.backward), ways, strict=True) if times)
    plain = row.forward[PLAIN] + row.backward.get(PLAIN, 0.0)
    return ways if ours < MARGIN * plain else None


def inside(row: Row) -> Ways:
    """The fastest in each direction among those inside of the fused operator, PyTorch's own included."""

    def fastest(times: dict[str, float]) -> Way:
        return min((way for way in Way if way.name.lower() in times), key=lambda way: times[way.name.lower()])

    forward = fastest(row.forward)
    return forward, fastest(row.backward) if row.backward else forward


def _ordinary(tensor: Tensor) -> bool:
    """Whether its values lie in its memory: a subclass or another layout may hold them elsewhere."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


def _now(x: Tensor, weight: Tensor, padding: int, tail: int, way: int, learns: bool, forward: bool) -> int:
    """The way, decided now if it was left for later."""
    kernels = native.load()
    if way >= 0:
        return way
    if kernels is None or x.numel() == 0:
        return Way.TORCH
    last, threads = native.last_order(x), torch.get_num_threads()
    layer = layer_of(x.shape, weight.shape, padding, tail, last, x.dtype, threads, learns, way == LATER_WITH_X)
    ways = inside(table.find(layer, kernels.isa, timing.measure))
    return ways[0] if forward else ways[1]


def _forward_operator(
    x: Tensor, weight: Tensor, bias: Tensor | None, padding: int, tail: int, way: int, keep: bool
) -> tuple[Tensor, Tensor]:
    """As an operator has to: with a tensor in every place."""
    way = _now(x, weight, padding, tail, way, keep, forward=True)
    y, code = op.forward(x, weight, bias, padding, tail, way, keep)
    return y, y.new_empty((0, 0, 0, 0), dtype=torch.uint8) if code is None else code


def _backward_operator(
    grad: Tensor, x: Tensor, weight: Tensor, kept: Tensor | None, padding: int, tail: int, way: int, wants_x: bool
) -> tuple[Tensor, Tensor, Tensor]:
    way = _now(x, weight, padding, tail, way, True, forward=False)
    grad_x, grad_weight, grad_bias = op.backward(grad, x, weight, kept, padding, tail, way, wants_x)
    return grad_weight.new_empty(0) if grad_x is None else grad_x, grad_weight, grad_bias


torch.library.impl("lockstep::conv_relu_forward", "CPU", _forward_operator)
torch.library.impl("lockstep::conv_relu_backward", "CPU", _backward_operator)
