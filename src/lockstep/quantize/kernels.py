"""The kernels themselves, each as a module that a graph can hold: oneDNN's on byte tensors, and PyTorch's older ones on its quantized tensors."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.quantize.scheme import SMALLEST_SCALE, Numbers, input_integers

_decomposed = torch.ops.quantized_decomposed


class Spot(NamedTuple):
    """One layer of the graph that a kernel is to take over."""

    conv: bool
    weight: Tensor
    scales: Tensor
    bias: Tensor | None
    arguments: list[Any]
    """Of a convolution: stride, padding, dilation, groups."""
    source: Numbers | None
    """The integers that come in; None: floats, whose range is to be taken from each batch."""
    result: Numbers | None
    """The integers that go out; None: floats."""
    relu: bool
    top: int


def pair(value: Any) -> list[int]:
    return list(value) if isinstance(value, list | tuple) else [value, value]


class Kernels(ABC):
    """What an engine has to offer: modules, so that the graph holds their packed weights."""

    @staticmethod
    @abstractmethod
    def layer(spot: Spot, integers: bool) -> nn.Module: ...

    @staticmethod
    @abstractmethod
    def quantize(numbers: Numbers) -> nn.Module: ...

    @staticmethod
    @abstractmethod
    def dequantize(numbers: Numbers) -> nn.Module: ...

    @staticmethod
    @abstractmethod
    def pool(arguments: list[Any]) -> nn.Module: ...

    @staticmethod
    def takes_pool(layer: nn.Module, arguments: list[Any]) -> bool:
        """Whether the layer computes the max-pool behind it as well, from now on."""
        return False


class _Call(nn.Module):
    """A function of one tensor as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, values: Tensor) -> Tensor:
        return self._function(values)


def pool_arguments(given: list[Any]) -> list[Any]:
    """Kernel, stride, padding, dilation, ceil_mode, each in full."""
    kernel = pair(given[0])
    stride = pair(given[1]) if len(given) > 1 and given[1] not in ([], None) else kernel
    padding, dilation = (pair(given[i]) if len(given) > i else [i - 2, i - 2] for i in (2, 3))
    return [kernel, stride, padding, dilation, bool(given[4]) if len(given) > 4 else False]


class OneDnnKernels(Kernels):
    @staticmethod
    def layer(spot: Spot, integers: bool) -> nn.Module:
        ops = torch.ops.onednn
        zeros = torch.zeros(len(spot.scales), dtype=torch.int64)
        after = _after(spot, spot.result if integers else None)
        rest = (spot.scales, zeros, spot.bias, *spot.arguments, *after)
        if spot.conv:
            assert spot.source is not None
            scale, zero, _ = spot.source
            packed = ops.qconv_prepack(spot.weight, spot.scales, scale, zero, *spot.arguments, None)
            return _Call(lambda values: ops.qconv_pointwise(values, scale, zero, packed, *rest))
        packed = ops.qlinear_prepack(spot.weight, None)
        if spot.source is None:
            return _Call(_dynamic(packed, rest, spot.top))
        scale, zero, _ = spot.source
        return _Call(lambda values: ops.qlinear_pointwise(values, scale, zero, packed, *rest))

    @staticmethod
    def quantize(numbers: Numbers) -> nn.Module:
        return _Call(lambda values: input_integers(values, numbers))

    @staticmethod
    def dequantize(numbers: Numbers) -> nn.Module:
        return _Call(lambda values: values.to(torch.float32).sub_(numbers.zero).mul_(numbers.scale))

    @staticmethod
    def pool(arguments: list[Any]) -> nn.Module:
        given = pool_arguments(arguments)
        return _Call(lambda values: torch.ops.quantized.max_pool2d(values, *given))


def _after(spot: Spot, output: Numbers | None) -> tuple[Any, ...]:
    """What follows the sum of products: the result's scale, zero point and type, and the operation before it is rounded."""
    if output is None:
        return 1.0, 0, torch.float32, "relu" if spot.relu else "none", [], ""
    scale, zero, top = output
    # A byte goes up to 255; with seven bits the kernel has to cut off at 127 itself, as training did.
    low, high = 0.0 if spot.relu else -zero * scale, (top - zero) * scale
    return scale, zero, torch.uint8, "hardtanh", [low, high], ""


def _dynamic(packed: Tensor, rest: tuple[Any, ...], top: int) -> Callable[[Tensor], Tensor]:
    def run(values: Tensor) -> Tensor:
        scale, zero = _decomposed.choose_qparams.tensor(values, 0, top, SMALLEST_SCALE, torch.uint8)
        integers = _decomposed.quantize_per_tensor.tensor(values, scale, zero, 0, top, torch.uint8)
        result: Tensor = torch.ops.onednn.qlinear_pointwise.tensor(integers, scale, zero, packed, *rest)
        return result

    return run


class OldKernels(Kernels):
    @staticmethod
    def layer(spot: Spot, integers: bool) -> nn.Module:
        ops = torch.ops.quantized
        zeros = torch.zeros(len(spot.scales), dtype=torch.int64)
        if torch.backends.quantized.engine == "qnnpack" and bool((spot.scales == spot.scales[0]).all()):
            weight = torch._make_per_tensor_quantized_tensor(spot.weight, float(spot.scales[0]), 0)
        else:
            weight = torch._make_per_channel_quantized_tensor(spot.weight, spot.scales.double(), zeros, 0)
        word = "_relu" if spot.relu else ""
        if spot.source is None:
            packed = ops.linear_prepack(weight, spot.bias)
            dynamic = getattr(ops, f"linear{word}_dynamic")
            return _Call(lambda values: dynamic(values, packed, spot.top < 255))
        assert spot.result is not None
        scale, zero, _ = spot.result
        kind = "conv2d" if spot.conv else "linear"
        packed = getattr(ops, f"{kind}_prepack")(weight, spot.bias, *spot.arguments)
        call = getattr(ops, f"{kind}{word}")
        if integers:
            return _Call(lambda values: call(values, packed, scale, zero))
        return _Call(lambda values: call(values, packed, scale, zero).dequantize())

    @staticmethod
    def quantize(numbers: Numbers) -> nn.Module:
        # These tensors know no upper end but 255; what lies above the range is cut off before.
        highest = numbers.scale * (numbers.top - numbers.zero)
        return _Call(
            lambda values: torch.quantize_per_tensor(
                values if numbers.top == 255 else values.clamp(max=highest), numbers.scale, numbers.zero, torch.quint8
            )
        )

    @staticmethod
    def dequantize(numbers: Numbers) -> nn.Module:
        return _Call(operator.methodcaller("dequantize"))

    @staticmethod
    def pool(arguments: list[Any]) -> nn.Module:
        given = pool_arguments(arguments)
        return _Call(lambda values: torch.max_pool2d(values, *given))
