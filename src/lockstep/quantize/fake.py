"""Layers that pretend to compute in integers, for training.

A fake layer rounds its input and its weights to the values that integers would have, and computes in fp32; gradients pass the rounding as if it were not there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lockstep.quantize.scheme import WEIGHT_TOP, Numbers, Scheme, from_range, weight_scales
from lockstep.torch_private import drop_load_hooks, hardtanh_backward

# Up to N weights torch's own kernel is faster, which is not vectorised but is one call.
SMALL = 8192


class _Grid:
    """The values that integers have. Its factors are tensors: of a plain number, every product would make one first."""

    def __init__(self, numbers: Numbers) -> None:
        scale, zero, top = numbers
        self.scale, self.inverse = torch.tensor(scale), torch.tensor(1.0 / scale)
        self.low, self.high = -zero, top - zero
        self.ends = ((self.low - 0.5) * scale, (self.high + 0.5) * scale)

    def nearest(self, values: Tensor) -> Tensor:
        return values.mul(self.inverse).round_().clamp_(self.low, self.high).mul_(self.scale)


class _RoundInput(torch.autograd.Function):
    """What torch.fake_quantize_per_tensor_affine computes, in passes that are vectorised: its own kernel is not, and was a tenth of a step."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, grid: _Grid) -> Tensor:
        ctx.save_for_backward(values)
        ctx.ends = grid.ends
        return grid.nearest(values)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None]:
        """The gradient where the input was within the range, zero where it was cut off."""
        (values,) = ctx.saved_tensors
        return hardtanh_backward(outer[0], values, *ctx.ends), None


class _RoundWeight(torch.autograd.Function):
    """The same for weights. None of them is cut off, so the gradient passes as it is."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scales: Tensor) -> Tensor:
        scales = scales.view(-1, *(1 for _ in range(weight.dim() - 1)))
        return weight.mul(scales.reciprocal()).round_().mul_(scales)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None]:
        return outer[0], None


class _Fake(nn.Module):
    """What a fake convolution and a fake linear layer have in common."""

    weight: Tensor
    input_range: Tensor
    """Smallest and largest input on all ranks; NaN before the first exchange."""
    weight_zeros: Tensor

    def begin(self, scheme: Scheme) -> None:
        device = self.weight.device
        self.scheme = scheme
        self.observing = False
        """Whether this step's inputs are looked at."""
        self.seen: Tensor | None = None
        """Minus the smallest input and the largest one since the ranks' last exchange."""
        self.numbers: Numbers | None = None
        self.grid: _Grid | None = None
        self.register_buffer("input_range", torch.full((2,), float("nan"), device=device))
        zeros = torch.zeros(len(self.weight), dtype=torch.int32, device=device)
        self.register_buffer("weight_zeros", zeros, persistent=False)
        self.register_load_state_dict_post_hook(lambda module, keys: module.settle())  # type: ignore[no-untyped-call]

    def settle(self) -> None:
        """Take the integers from the range. As plain numbers: reading them from a tensor would cost a call a pass."""
        low, high = self.input_range.tolist()
        self.numbers = from_range(low, high, self.scheme) if low <= high else None
        self.grid = _Grid(self.numbers) if self.numbers else None

    def fake_input(self, input: Tensor) -> Tensor:
        if self.observing and self.training:
            low, high = torch.aminmax(input.detach())
            now = torch.stack((-low, high))
            self.seen = now if self.seen is None else torch.maximum(self.seen, now)
        if self.grid is None:  # the first step of all only looks
            return input
        if not input.requires_grad:  # the images themselves, and every test
            return self.grid.nearest(input)
        rounded: Tensor = _RoundInput.apply(input, self.grid)  # type: ignore[no-untyped-call]
        return rounded

    def fake_weight(self) -> Tensor:
        weight, zeros = self.weight, self.weight_zeros
        scales = weight_scales(weight.detach(), self.scheme)
        if weight.numel() < SMALL:
            # PyTorch takes scales in float32 alone, also for weights in float64 (`lockstep verify` judges by them).
            return torch.fake_quantize_per_channel_affine(weight, scales.float(), zeros, 0, -WEIGHT_TOP, WEIGHT_TOP)
        rounded: Tensor = _RoundWeight.apply(weight, scales)  # type: ignore[no-untyped-call]
        return rounded


class FakeConv2d(_Fake, nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        result: Tensor = self._conv_forward(self.fake_input(input), self.fake_weight(), self.bias)
        return result


class FakeLinear(_Fake, nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(self.fake_input(input), self.fake_weight(), self.bias)


FAKES: dict[type[nn.Module], type[_Fake]] = {nn.Conv2d: FakeConv2d, nn.Linear: FakeLinear}
REAL: dict[type[nn.Module], type[nn.Module]] = {FakeConv2d: nn.Conv2d, FakeLinear: nn.Linear}


def make_fake(layer: nn.Module, scheme: Scheme) -> None:
    """Turn a layer into a fake one. It stays the same object, so whoever refers to it (a tied layer, an optimizer) still does."""
    layer.__class__ = FAKES[type(layer)]
    assert isinstance(layer, _Fake)
    layer.begin(scheme)


def make_real(layer: nn.Module) -> Numbers | None:
    """The way back; returns what the fake layer's input integers were."""
    assert isinstance(layer, _Fake)
    numbers = layer.numbers
    drop_load_hooks(layer)
    del layer.input_range, layer.weight_zeros
    for name in ("scheme", "observing", "seen", "numbers", "grid"):
        delattr(layer, name)
    layer.__class__ = REAL[type(layer)]  # type: ignore[assignment]
    return numbers


def fakes(model: nn.Module) -> dict[str, _Fake]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, _Fake)}
