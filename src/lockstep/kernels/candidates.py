"""The ways that are compared: PyTorch's operators in several settings, oneDNN's fused one, and ours, on the same numbers.

On a GPU: PyTorch's operators with cuDNN and without, and our CUDA and Triton kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

from lockstep.kernels import op
from lockstep.kernels.timing import MANY
from lockstep.kernels.way import Way, possible
from lockstep.machine import inductor
from lockstep.machine.formats import cpu_support
from lockstep.torch_private import mkldnn, without_onednn


class Shape(msgspec.Struct, frozen=True):
    """One layer: a 3x3 convolution with padding 1 unless `kernel` says otherwise."""

    channels: int
    out_channels: int
    size: int
    pool: bool
    grad_x: bool
    """Whether the gradient of x is wanted: not for a net's first layer."""
    channels_last: bool = False
    """Whether x lies in channels-last order."""
    kernel: int = 3

    @property
    def name(self) -> str:
        words = [f"{self.channels}→{self.out_channels}@{self.size}"]
        words += [f"{self.kernel}x{self.kernel}"] if self.kernel != 3 else []
        words += ["pool"] if self.pool else []
        words += [] if self.grad_x else ["first"]
        return ", ".join(words + (["last"] if self.channels_last else []))

    @property
    def padding(self) -> int:
        return self.kernel // 2


# The layers of the published nets: D's two, A's six, C's two; with the pool behind them where they have one, and without. Of more than one
# channel, x comes in either order of memory.
PUBLISHED = tuple(
    Shape(*sizes, last)
    for last in (False, True)
    for sizes in (
        (1, 4, 28, True, False),
        (4, 8, 14, True, True),
        (1, 4, 28, False, False),
        (4, 8, 14, False, True),
        (4, 8, 28, False, True),
        (1, 32, 28, False, False),
        (32, 32, 28, False, True),
        (3, 32, 32, False, False),
        (32, 64, 32, True, True),
        (32, 64, 32, False, True),
        (64, 128, 16, False, True),
        (128, 256, 16, True, True),
        (256, 256, 8, False, True),
        (256, 256, 8, True, True),
    )
    if not (last and sizes[0] == 1)
)
# What is measured unless layers are named: with larger kernels too, as LeNet and its like have them.
LAYERS = (
    *PUBLISHED,
    Shape(1, 6, 28, True, False, kernel=5),
    Shape(6, 16, 14, True, True, kernel=5),
    Shape(1, 32, 28, False, False, kernel=5),
    Shape(3, 32, 32, False, False, kernel=5),
)


@dataclass
class Candidate:
    """A way, with tensors of its own, so that layouts and gradients do not mix."""

    name: str
    run: Callable[[], Tensor]
    inputs: list[Tensor]
    """x, weight, bias."""
    grad: Tensor
    trains: bool = True
    around: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext)
    """What has to hold while it runs, in both directions."""


def candidates(shape: Shape, batch: int, compiled: bool, brief: bool = False, device: str = "cpu") -> list[Candidate]:
    """ "torch" first: what the others are compared with. `brief`: nothing else but ours."""
    planar = tuple(tensor.to(device) for tensor in _numbers(shape, batch))
    grad = _grad(shape, batch).to(device)
    last = (_last(planar[0]), _last(planar[1]), planar[2])
    given = last if shape.channels_last else planar
    found = [_eager("torch", shape, given, grad)]
    if not brief:
        other = ("contiguous", planar) if shape.channels_last else ("channels_last", last)
        found.append(_eager(other[0], shape, other[1], grad))
        found += _settings(shape, given, last, grad, device)
        if compiled:
            found.append(_compiled(shape, given, grad))
    if device == "cuda":
        return found + _ours_on_cuda(shape, given, grad)
    for way in possible(shape.channels, shape.out_channels, shape.kernel, shape.padding, torch.float32):
        if way is Way.WINOGRAD or (way is Way.DIRECT and shape.channels * shape.out_channels < MANY):
            found.append(_ours(way.name.lower(), way, shape, given, grad))
    return found


def _settings(
    shape: Shape, given: tuple[Tensor, ...], last: tuple[Tensor, ...], grad: Tensor, device: str
) -> list[Candidate]:
    """What else PyTorch has on this device."""
    if device == "cuda":
        return [_eager("cudnn off", shape, given, grad, lambda: torch.backends.cudnn.flags(enabled=False))]
    found = [_eager("onednn off", shape, given, grad, without_onednn)]
    if cpu_support()["bf16"]:  # without the instructions it takes twenty times as long
        found.append(_eager("bf16", shape, tuple(tensor.bfloat16() for tensor in last), grad.bfloat16()))
    return found if shape.pool else [*found, _onednn_fused(shape, last, grad)]


# The same numbers are asked for at every count of threads.
@lru_cache(maxsize=1)
def exact(shape: Shape, batch: int) -> list[Tensor]:
    """Result and gradients in double precision."""
    x, weight, bias = (tensor.double().requires_grad_() for tensor in _numbers(shape, batch))
    y = _written(shape, x, weight, bias)
    y.backward(_grad(shape, batch).double())  # type: ignore[no-untyped-call]
    return [y.detach(), *(tensor.grad for tensor in (x, weight, bias) if tensor.grad is not None)]


def _written(shape: Shape, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """As people write it: convolution, ReLU, pool."""
    y = functional.relu(functional.conv2d(x, weight, bias, padding=shape.padding))
    return functional.max_pool2d(y, 2) if shape.pool else y


def _numbers(shape: Shape, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    conv = nn.Conv2d(shape.channels, shape.out_channels, shape.kernel, padding=shape.padding)
    x = torch.randn(batch, shape.channels, shape.size, shape.size, generator=generator)
    bound = 1 / (shape.channels * shape.kernel**2) ** 0.5
    for parameter in conv.parameters():
        nn.init.uniform_(parameter, -bound, bound, generator=generator)
    return x, conv.weight.detach(), conv.bias.detach()  # type: ignore[union-attr]


def _grad(shape: Shape, batch: int) -> Tensor:
    size = result_size(shape)
    return torch.randn(batch, shape.out_channels, size, size, generator=torch.Generator().manual_seed(4))


def _last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


def result_size(shape: Shape) -> int:
    return shape.size // 2 if shape.pool else shape.size


def _inputs(shape: Shape, numbers: tuple[Tensor, ...]) -> list[Tensor]:
    x, weight, bias = (tensor.detach().clone(memory_format=torch.preserve_format) for tensor in numbers)
    return [x.requires_grad_(shape.grad_x), weight.requires_grad_(), bias.requires_grad_()]


def _eager(
    name: str,
    shape: Shape,
    numbers: tuple[Tensor, ...],
    grad: Tensor,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Candidate:
    x, weight, bias = inputs = _inputs(shape, numbers)
    layout = torch.channels_last if x.shape[1] > 1 and not x.is_contiguous() else torch.contiguous_format
    grad = grad.contiguous(memory_format=layout)
    return Candidate(name, lambda: _written(shape, x, weight, bias), inputs, grad, around=around)


def _compiled(shape: Shape, numbers: tuple[Tensor, ...], grad: Tensor) -> Candidate:
    x, weight, bias = inputs = _inputs(shape, numbers)
    inductor.choose_folder()
    compiled = torch.compile(partial(_written, shape), dynamic=False)
    return Candidate("compile", lambda: compiled(x, weight, bias), inputs, grad)


def _onednn_fused(shape: Shape, numbers: tuple[Tensor, ...], grad: Tensor) -> Candidate:
    """oneDNN's own fused operator, which has no backward pass."""
    x, weight, bias = (tensor.detach() for tensor in numbers)
    packed = mkldnn._reorder_convolution_weight(weight, [shape.padding] * 2, [1, 1], [1, 1], 1, list(x.shape))

    def run() -> Tensor:
        result: Tensor = mkldnn._convolution_pointwise(
            x, packed, bias, [shape.padding] * 2, [1, 1], [1, 1], 1, "relu", [], ""
        )
        return result

    return Candidate("onednn fused", run, [x, weight, bias], grad, trains=False)


def _ours(name: str, way: Way, shape: Shape, numbers: tuple[Tensor, ...], grad: Tensor) -> Candidate:
    x, weight, bias = inputs = _inputs(shape, numbers)
    layout = torch.channels_last if shape.channels_last else torch.contiguous_format
    call = lambda: op.fused(x, weight, bias, shape.padding, shape.pool, way)  # noqa: E731
    return Candidate(name, call, inputs, grad.contiguous(memory_format=layout))


def _ours_on_cuda(shape: Shape, numbers: tuple[Tensor, ...], grad: Tensor) -> list[Candidate]:
    from lockstep.kernels import gpu

    found = [_ours("cuda", Way.DIRECT, shape, numbers, grad)] if gpu.register() else []
    if find_spec("triton"):
        from lockstep.kernels import triton_kernels

        x, weight, bias = inputs = _inputs(shape, numbers)
        call = lambda: triton_kernels.conv_relu(x, weight, bias, shape.padding, shape.pool)  # noqa: E731
        found.append(Candidate("triton", call, inputs, grad))
    return found
