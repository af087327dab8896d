"""Layers that compute in integers.

Their weights are bytes. Their forward pass is in PyTorch's decomposed form (quantize, dequantize, compute), which torch.export, inductor
and ONNX understand. With `use_kernels` they call the integer kernel instead, layer by layer, with no compiler.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lockstep.quantize.scheme import (
    SMALLEST_SCALE,
    WEIGHT_TOP,
    Numbers,
    Scheme,
    input_integers,
    weight_integers,
    weight_scales,
)
from lockstep.torch_private import onednn, quantized_decomposed

_decomposed = quantized_decomposed()


class _Int8(nn.Module):
    """What int8 layers have in common: weights as bytes, a scale for each output channel, and the integers of the input."""

    weight_scale: Tensor
    weight_zero: Tensor

    def __init__(self, layer: nn.Conv2d | nn.Linear, numbers: Numbers | None, scheme: Scheme) -> None:
        super().__init__()
        weight = layer.weight.detach()
        scales = weight_scales(weight, scheme)
        # A parameter, as before: what asks a model for its device asks its parameters.
        self.weight = nn.Parameter(weight_integers(weight, scales).contiguous(), requires_grad=False)
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().clone(), requires_grad=False)
        self.register_buffer("weight_scale", scales)
        self.register_buffer("weight_zero", torch.zeros(len(weight), dtype=torch.int64), persistent=False)
        self.numbers, self.scheme = numbers, scheme
        self._packed: Tensor | None = None

    def get_extra_state(self) -> list[float | int]:
        return [] if self.numbers is None else list(self.numbers)

    def set_extra_state(self, state: list[float | int]) -> None:
        if state:
            self.numbers = Numbers(float(state[0]), int(state[1]), int(state[2]))

    def float_weight(self) -> Tensor:
        """The weights' values, as torch.export is to see them: bytes and scales, put together when they are used."""
        result: Tensor = _decomposed.dequantize_per_channel(
            self.weight, self.weight_scale, self.weight_zero, 0, -WEIGHT_TOP, WEIGHT_TOP, torch.int8
        )
        return result

    def rounded(self, input: Tensor) -> Tensor:
        assert self.numbers is not None
        scale, zero, top = self.numbers
        integers = _decomposed.quantize_per_tensor(input, scale, zero, 0, top, torch.uint8)
        result: Tensor = _decomposed.dequantize_per_tensor(integers, scale, zero, 0, top, torch.uint8)
        return result


class Int8Conv2d(_Int8):
    def __init__(self, layer: nn.Conv2d, numbers: Numbers, scheme: Scheme) -> None:
        super().__init__(layer, numbers, scheme)
        self.geometry = list(layer.stride), padding_of(layer), list(layer.dilation), layer.groups

    def forward(self, input: Tensor) -> Tensor:
        if self._packed is None:
            return functional.conv2d(self.rounded(input), self.float_weight(), self.bias, *self.geometry)
        assert self.numbers is not None
        scale, zero, _ = self.numbers
        weights = (self._packed, self.weight_scale, self.weight_zero, self.bias)
        integers = input_integers(input, self.numbers)
        result: Tensor = onednn.qconv_pointwise(integers, scale, zero, *weights, *self.geometry, *FLOAT_OUTPUT)
        return result

    def pack(self) -> None:
        assert self.numbers is not None
        scale, zero, _ = self.numbers
        self._packed = onednn.qconv_prepack(self.weight, self.weight_scale, scale, zero, *self.geometry, None)


class Int8Linear(_Int8):
    """Without numbers, its input's range is taken from each batch anew: dynamic quantization."""

    def forward(self, input: Tensor) -> Tensor:
        if self._packed is not None:
            return self._integer(input)
        if self.numbers:
            rounded = self.rounded(input)
        else:
            top = self.scheme.top
            integers, scale, zero = batch_integers(input, top)
            rounded = _decomposed.dequantize_per_tensor.tensor(integers, scale, zero, 0, top, torch.uint8)
        return functional.linear(rounded, self.float_weight(), self.bias)

    def _integer(self, input: Tensor) -> Tensor:
        scale: Any
        zero: Any
        if self.numbers:
            scale, zero, _ = self.numbers
            integers = input_integers(input, self.numbers)
        else:
            integers, scale, zero = batch_integers(input, self.scheme.top)
        result: Tensor = onednn.qlinear_pointwise(
            integers, scale, zero, self._packed, self.weight_scale, self.weight_zero, self.bias, *FLOAT_OUTPUT
        )
        return result

    def pack(self) -> None:
        self._packed = onednn.qlinear_prepack(self.weight, None)


def batch_integers(values: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """The inputs as bytes from 0 to `top`, with the scale and the zero point of this batch's own range."""
    scale, zero = _decomposed.choose_qparams.tensor(values, 0, top, SMALLEST_SCALE, torch.uint8)
    return _decomposed.quantize_per_tensor.tensor(values, scale, zero, 0, top, torch.uint8), scale, zero


# What oneDNN's kernels make of the result: output scale and zero point, its type, no further operation.
FLOAT_OUTPUT: tuple[Any, ...] = (1.0, 0, torch.float32, "none", [], "")


def kernels_are_here() -> bool:
    here: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return here and hasattr(onednn, "qconv_pointwise")


def use_kernels(model: nn.Module) -> None:
    """From now on the int8 layers call oneDNN's integer kernels."""
    for layer in model.modules():
        if isinstance(layer, Int8Conv2d | Int8Linear):
            layer.pack()


def padding_of(layer: nn.Conv2d) -> list[int]:
    """The padding in numbers, also where it was given as a word; empty where the two sides of an axis differ."""
    if not isinstance(layer.padding, str):
        return list(layer.padding)
    if layer.padding == "valid":
        return [0, 0]
    whole = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    return [] if any(w % 2 for w in whole) else [w // 2 for w in whole]
