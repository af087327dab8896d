"""How numbers become integers: a range, and from it a scale and a zero point.

Weights are symmetric around zero, from -127 to 127: the int8 kernels of x86 take no other. Inputs are unsigned. Seven bits are the default, as
PyTorch's for x86: without VNNI a CPU adds two products of an unsigned and a signed byte in 16 bits, where 255 x 127 x 2 does not fit and is
cut off without a word. 127 x 127 x 2 fits.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from lockstep.errors import InputError

WEIGHT_TOP = 127
# A plain number would become a tensor in every step.
_WEIGHT_TOP = torch.tensor(float(WEIGHT_TOP))
# A scale of zero (weights or inputs that are zero throughout) would divide by zero.
SMALLEST_SCALE = torch.finfo(torch.float32).eps


class Scheme(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is chosen about the integers."""

    weights: Literal["per-channel", "per-tensor"] = "per-channel"
    """One scale for each output channel, or one for all."""
    activations: Literal["affine", "symmetric"] = "affine"
    """affine: from the smallest to the largest input; symmetric: as far below zero as above."""
    bits: Literal[7, 8] = 7
    """Of the inputs; weights have eight."""
    ranges: Literal["min-max", "percentile", "mse"] = "min-max"
    """static: how much of what calibration images showed the integers cover (calibrate.py)."""

    @property
    def top(self) -> int:
        """The largest integer of an input."""
        return int(2**self.bits - 1)


class Numbers(NamedTuple):
    """What an input's integers mean: real value = scale x (integer - zero), with integers from 0 to top."""

    scale: float
    zero: int
    top: int


def from_range(low: float, high: float, scheme: Scheme) -> Numbers:
    """The integers for inputs from `low` to `high`. Zero is always one of them exactly: padding and ReLU make zeros."""
    top = scheme.top
    if not (low <= high and abs(low) != float("inf") and abs(high) != float("inf")):
        raise InputError(
            f"inputs from {low:g} to {high:g} have no scale: the model computes numbers that are not finite"
        )
    low, high = min(low, 0.0), max(high, 0.0)
    if scheme.activations == "symmetric":
        zero = (top + 1) // 2
        return Numbers(max(max(-low, high) / (top - zero), SMALLEST_SCALE), zero, top)
    scale = max((high - low) / top, SMALLEST_SCALE)
    return Numbers(scale, min(max(round(-low / scale), 0), top), top)


def weight_scales(weight: Tensor, scheme: Scheme) -> Tensor:
    """One scale for each output channel; per-tensor, all of them are the same."""
    if scheme.weights == "per-channel":
        largest = weight.abs().amax(tuple(range(1, weight.dim())))
    else:
        largest = weight.abs().amax().repeat(len(weight))
    return largest.div_(_WEIGHT_TOP).clamp_(min=SMALLEST_SCALE)


def weight_integers(weight: Tensor, scales: Tensor) -> Tensor:
    """The weights as bytes, rounded as torch's fake quantization rounds them."""
    inverse = scales.reciprocal().view(-1, *(1 for _ in range(weight.dim() - 1)))
    return weight.mul(inverse).round_().clamp_(-WEIGHT_TOP, WEIGHT_TOP).to(torch.int8)


def input_integers(values: Tensor, numbers: Numbers) -> Tensor:
    """The inputs as bytes, rounded as torch's decomposed operator rounds them."""
    scale, zero, top = numbers
    return values.mul(1.0 / scale).round_().add_(zero).clamp_(0, top).to(torch.uint8)
