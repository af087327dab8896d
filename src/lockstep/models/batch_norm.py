"""Batch norm whose mean and variance are those of all ranks' samples."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from lockstep.models.samples import bound
from lockstep.torch_private import batch_norm_backward


class BatchNorm2d(nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d`, with mean and variance over the samples of all ranks (synchronised), or of this rank."""

    def __init__(self, channels: int, synchronised: bool = True, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__(channels, eps=eps, momentum=momentum)
        self.synchronised = synchronised
        self._part = momentum
        self.group: dist.ProcessGroup | None = None
        """Of a synchronised layer: whose samples count; None: those of all ranks."""

    def extra_repr(self) -> str:
        return f"{self.num_features}, synchronised={self.synchronised}"

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        real = len(input) if bound.real is None else bound.real
        if self.synchronised and world_size() > 1:
            return self._together(input, real)
        if real == 0:  # a dummy sample passes through without changing the statistics
            return functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        return super().forward(input)

    def _together(self, input: Tensor, real: int) -> Tensor:
        values = input if input.dtype in (torch.float32, torch.float64) else input.float()
        mean, variance, count = _moments(values[:real], self.group)
        with torch.no_grad():
            assert self.running_mean is not None
            assert self.running_var is not None
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            unbiased = variance * (count / (count - 1).clamp(min=1))
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), self._part)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), self._part)
        weight, bias = self.weight.to(values.dtype), self.bias.to(values.dtype)
        normalised: Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
            values, weight, bias, mean.to(values.dtype), variance.to(values.dtype), count, real, self.eps, self.group
        )
        return normalised.to(input.dtype)


@torch.no_grad()
def _moments(values: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance (over the count itself) and count of each channel over all ranks, in float64.

    Ranks exchange sums. In float64, the difference of two sums still has all digits of a float32 variance.
    """
    channels = values.shape[1]
    sums = torch.zeros(2 * channels + 1, dtype=torch.float64, device=values.device)
    count = values.numel() // channels
    if count:
        mean, variance = (moment.double() for moment in torch.batch_norm_update_stats(values, None, None, 0.0))
        sums[:channels] = mean * count
        sums[channels:-1] = (variance + mean * mean) * count
        sums[-1] = count
    dist.all_reduce(sums, group=group)
    total = sums[-1]
    mean = sums[:channels] / total
    return mean, (sums[channels:-1] / total - mean * mean).clamp_(min=0), total


class _Normalise(torch.autograd.Function):
    """Normalise by the moments of all ranks' samples, so the gradient needs sums over all ranks too."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        weight: Tensor,
        bias: Tensor,
        mean: Tensor,
        variance: Tensor,
        count: Tensor,
        real: int,
        eps: float,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        ctx.save_for_backward(values, weight, mean, variance, count)
        ctx.real, ctx.eps, ctx.group = real, eps, group
        return functional.batch_norm(values, mean, variance, weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = outer
        values, weight, mean, variance, count = ctx.saved_tensors
        # Over this rank's samples; a dummy one has a gradient of zero.
        _, by_weight, by_bias = batch_norm_backward(
            gradient, values, weight, mean, variance, None, None, False, ctx.eps, [False, True, True]
        )
        sums = torch.stack((by_weight, by_bias)).double()
        dist.all_reduce(sums, group=ctx.group)
        slope, level = (sums / count).to(values.dtype)
        inverse = (variance + ctx.eps).rsqrt()
        scale = weight * inverse
        # scale x (gradient - level - normalised x slope), written as a sum of two products and a constant
        by_value = scale * inverse * slope
        constant = by_value * mean - scale * level
        if ctx.real:
            inner = torch.addcmul(_wide(constant), values, _wide(-by_value)).addcmul_(gradient, _wide(scale))
            inner[ctx.real :] = 0
        else:
            inner = torch.zeros_like(values)
        return inner, by_weight, by_bias, None, None, None, None, None, None


def _wide(channels: Tensor) -> Tensor:
    return channels.view(1, -1, 1, 1)


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
