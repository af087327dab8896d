"""Dropout and batch norm that compute the same on every placement; for the published nets and for a user's own.

The training step calls `bind` before each forward pass, since a layer sees activations and not which samples they are of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep import keyed
from lockstep.errors import InputError


@dataclass
class _Bound:
    """What the next forward pass is about."""

    keys: Tensor | None = None
    real: int | None = None


_bound = _Bound()


def bind(keys: Tensor | None, real: int | None) -> None:
    """Say which samples the next forward pass is about, and how many of them count (None: all).

    A rank without samples in a short last batch computes a dummy one to take part: it counts for nothing (real = 0).
    """
    _bound.keys, _bound.real = keys, real


class Dropout(nn.Dropout):
    """Each feature of each sample is zero with probability p, the others are divided by 1 - p. No dropout in eval mode.

    Whether it is zero depends on (seed, epoch, sample, layer, feature) alone. The first dimension has to be the samples.
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__(p)
        if not 0 <= p < 1:
            raise ValueError(f"dropout p={p} is not from 0 to below 1")
        self.number = 0
        """Which dropout layer of its model this is (`prepare`)."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return input
        keys = _bound.keys
        if keys is None or len(keys) != len(input):
            known = "none are bound" if keys is None else f"{len(keys)} are bound for {len(input)} rows"
            raise InputError(
                f"Dropout needs the keys of its samples, and {known}: call lockstep.models.layers.bind first"
            )
        words = keyed.words(keys, keyed.Stream.DROPOUT + self.number, input[0].numel())
        # A signed word is below this one in p of all cases.
        kept = words >= min(round(self.p * 2**32) - 2**31, 2**31 - 1)
        return input * kept.view(input.shape).to(input.dtype).mul_(1 / (1 - self.p))


class BatchNorm2d(nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d`, with mean and variance over the samples of all ranks (synchronised), or of this rank."""

    def __init__(self, channels: int, synchronised: bool = True, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__(channels, eps=eps, momentum=momentum)
        self.synchronised = synchronised
        self._part = momentum

    def extra_repr(self) -> str:
        return f"{self.num_features}, synchronised={self.synchronised}"

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        real = len(input) if _bound.real is None else _bound.real
        if self.synchronised and _world() > 1:
            return self._together(input, real)
        if real == 0:  # a dummy sample: it passes through, and leaves no trace
            return functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        return super().forward(input)

    def _together(self, input: Tensor, real: int) -> Tensor:
        values = input if input.dtype in (torch.float32, torch.float64) else input.float()
        mean, variance, count = _moments(values[:real])
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
            values, weight, bias, mean.to(values.dtype), variance.to(values.dtype), count, real, self.eps
        )
        return normalised.to(input.dtype)


@torch.no_grad()
def _moments(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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
    dist.all_reduce(sums)
    total = sums[-1]
    mean = sums[:channels] / total
    return mean, (sums[channels:-1] / total - mean * mean).clamp_(min=0), total


class _Normalise(torch.autograd.Function):
    """Normalise by given moments, which are those of all ranks' samples: so the gradient needs sums over all ranks too."""

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
    ) -> Tensor:
        ctx.save_for_backward(values, weight, mean, variance, count)
        ctx.real, ctx.eps = real, eps
        return functional.batch_norm(values, mean, variance, weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = outer
        values, weight, mean, variance, count = ctx.saved_tensors
        # Over this rank's samples; a dummy one has a gradient of zero.
        _, by_weight, by_bias = torch.ops.aten.native_batch_norm_backward(
            gradient, values, weight, mean, variance, None, None, False, ctx.eps, [False, True, True]
        )
        sums = torch.stack((by_weight, by_bias)).double()
        dist.all_reduce(sums)
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
        return inner, by_weight, by_bias, None, None, None, None, None


def _wide(channels: Tensor) -> Tensor:
    return channels.view(1, -1, 1, 1)


def _world() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def prepare(model: nn.Module) -> None:
    """Number the dropout layers, so that each has masks of its own, and keep DDP from overwriting our statistics."""
    for number, layer in enumerate(layer for layer in model.modules() if isinstance(layer, Dropout)):
        layer.number = number
    names = statistics(model)
    if names:
        # DDP would send rank 0's statistics to all before every forward pass, and so lose the other ranks'.
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)  # type: ignore[no-untyped-call]


def statistics(model: nn.Module) -> list[str]:
    """The names of the buffers that our batch norm keeps; no strategy needs to send them around (see `settle`)."""
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, BatchNorm2d)]
    return [f"{name}.{buffer}" if name else buffer for name, layer in layers for buffer, _ in layer.named_buffers()]


def needs_keys(model: nn.Module) -> bool:
    """Whether a training pass of this model needs the keys of its samples."""
    return any(isinstance(layer, Dropout) and layer.p > 0 for layer in model.modules())


def synchronises(model: nn.Module) -> bool:
    """Whether its ranks exchange something in each forward pass, so that all of them have to make the same number."""
    return any(isinstance(layer, BatchNorm2d) and layer.synchronised for layer in model.modules())


@torch.no_grad()
def settle(model: nn.Module) -> None:
    """Collective: give all ranks the same running statistics: the mean of theirs, and the most passes that any has counted.

    Called before evaluation and checkpoints.

    Synchronised layers have the same ones already, and a model without batch norm has none: then nothing is sent.
    """
    if _world() == 1:
        return
    own = [
        layer
        for layer in model.modules()
        if isinstance(layer, _BatchNorm) and not (isinstance(layer, BatchNorm2d) and layer.synchronised)
    ]
    found = [s for layer in own for s in (layer.running_mean, layer.running_var) if s is not None]
    if not found:
        return
    together = torch.cat([statistic.double() for statistic in found])
    dist.all_reduce(together)
    together /= _world()
    for statistic, mean in zip(found, torch.split(together, [len(statistic) for statistic in found]), strict=True):
        statistic.copy_(mean)
    # Ranks may have made different numbers of passes: the last, partial batch need not fill all of every rank's micro batches.
    counters = [layer.num_batches_tracked for layer in own if layer.num_batches_tracked is not None]
    passes = torch.stack(counters)
    dist.all_reduce(passes, op=dist.ReduceOp.MAX)
    for counter, count in zip(counters, passes, strict=True):
        counter.copy_(count)
