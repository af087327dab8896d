"""The kernels themselves, each as a module that a graph can hold: oneDNN's on byte tensors, and qnnpack's on quantized tensors."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lockstep.machine.cpu import allowed_flags, cpu_flags
from lockstep.machine.native_code import compiler, has_compiler
from lockstep.quantize.layers import batch_integers
from lockstep.quantize.scheme import Numbers, input_integers
from lockstep.torch_private import onednn, per_channel_quantized, per_tensor_quantized, quantized


class LayerSpec(NamedTuple):
    """All that a kernel needs to take over one layer of the graph."""

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
    def layer(spec: LayerSpec, integers: bool) -> nn.Module: ...

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


def lacking(needs: set[str], name: str) -> str:
    """Why compiled kernels that need these instructions cannot run here; empty where they can."""
    if not cpu_flags() >= needs:
        return f"it needs a CPU with {name}"
    if not allowed_flags() >= needs:
        return f"it needs {name}, which ONEDNN_MAX_CPU_ISA or ATEN_CPU_CAPABILITY forbids"
    return "" if has_compiler() else f"it needs a C++ compiler ({compiler()})"


POOL_BY_TWO = [[2, 2], [2, 2], [0, 0], [1, 1], False]


def rounding(spec: LayerSpec, source: Numbers, result: Numbers | None) -> tuple[Tensor, Tensor]:
    """Factors and offsets per output channel: a byte is round(sum x factor + offset) + the result's zero, a float is sum x factor + offset."""
    scale = 1.0 if result is None else result.scale
    factors = spec.scales.float() * (source.scale / scale)
    bias = torch.zeros_like(factors) if spec.bias is None else spec.bias.float()
    return factors.contiguous(), (bias / scale).contiguous()


class OneDnnKernels(Kernels):
    @staticmethod
    def layer(spec: LayerSpec, integers: bool) -> nn.Module:
        ops = onednn
        zeros = torch.zeros(len(spec.scales), dtype=torch.int64)
        after = _after(spec, spec.result if integers else None)
        rest = (spec.scales, zeros, spec.bias, *spec.arguments, *after)
        if spec.conv:
            assert spec.source is not None
            scale, zero, _ = spec.source
            packed = ops.qconv_prepack(spec.weight, spec.scales, scale, zero, *spec.arguments, None)
            return _Call(lambda values: ops.qconv_pointwise(values, scale, zero, packed, *rest))
        packed = ops.qlinear_prepack(spec.weight, None)
        if spec.source is None:

            def dynamic(values: Tensor) -> Tensor:
                integers, scale, zero = batch_integers(values, spec.top)
                result: Tensor = onednn.qlinear_pointwise.tensor(integers, scale, zero, packed, *rest)
                return result

            return _Call(dynamic)
        scale, zero, _ = spec.source
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
        return _Call(lambda values: quantized.max_pool2d(values, *given))


def _after(spec: LayerSpec, output: Numbers | None) -> tuple[Any, ...]:
    """What follows the sum of products: the result's scale, zero point and type, and the operation before it is rounded."""
    if output is None:
        return 1.0, 0, torch.float32, "relu" if spec.relu else "none", [], ""
    scale, zero, top = output
    # A byte goes up to 255; with seven bits the kernel has to cut off at 127 itself, as training did.
    low, high = 0.0 if spec.relu else -zero * scale, (top - zero) * scale
    return scale, zero, torch.uint8, "hardtanh", [low, high], ""


class QnnpackKernels(Kernels):
    """What torch.ao's eager mode calls. torch.backends.quantized.engine has to be qnnpack when they are made and called."""

    @staticmethod
    def layer(spec: LayerSpec, integers: bool) -> nn.Module:
        if bool((spec.scales == spec.scales[0]).all()):
            weight = per_tensor_quantized(spec.weight, float(spec.scales[0]), 0)
        else:
            zeros = torch.zeros(len(spec.scales), dtype=torch.int64)
            weight = per_channel_quantized(spec.weight, spec.scales.double(), zeros, 0)
        suffix = "_relu" if spec.relu else ""
        if spec.source is None:
            packed = quantized.linear_prepack(weight, spec.bias)
            dynamic = getattr(quantized, f"linear{suffix}_dynamic")
            return _Call(lambda values: dynamic(values, packed, spec.top < 255))
        assert spec.result is not None
        scale, zero, _ = spec.result
        kind = "conv2d" if spec.conv else "linear"
        packed = getattr(quantized, f"{kind}_prepack")(weight, spec.bias, *spec.arguments)
        call = getattr(quantized, f"{kind}{suffix}")
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
