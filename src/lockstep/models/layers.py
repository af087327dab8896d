"""Dropout and batch norm that compute the same on every placement; for the published nets and for a user's own.

The training step calls `bind` before each forward pass, since a layer sees activations and not which samples they are of.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
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
    calls: dict[int, int] = field(default_factory=dict)
    """How often each dropout layer was called in this pass: a layer that is used twice has other masks the second time."""


_bound = _Bound()


def bind(keys: Tensor | None, real: int | None) -> None:
    """Say which samples the next forward pass is about, and how many of them count (None: all).

    A rank without samples in a short last batch computes a dummy one to take part: it counts for nothing (real = 0).
    """
    _bound.keys, _bound.real = keys, real
    _bound.calls.clear()


class Keyed(nn.Module):
    """A dropout layer whose masks depend on (seed, epoch, sample, layer, call, feature) alone. The first dimension is the samples,
    or several rows of each sample, one sample after the other. No dropout in eval mode."""

    p: float
    number = 0
    """Which dropout layer of its model this is (`prepare`)."""
    automatic = False
    """It stands where the user had torch's own (`prepare`): where its samples cannot be told it draws as that does."""
    lost = False
    """Automatic, and its samples could not be told."""

    def _kept(self, input: Tensor, channels: bool = False) -> Tensor | None:
        """Which features of each sample, or which of its channels, are kept; in a shape that broadcasts to the input's."""
        keys, rows = _bound.keys, len(input) if input.dim() else 0
        if keys is None or rows == 0 or rows % len(keys):
            self._unknown(keys, rows)
            return None
        calls = _bound.calls
        call = calls.get(self.number, 0)
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            call = self._again(call)  # activation checkpointing computes it anew within backward
        else:
            calls[self.number] = call + 1
        shape = (*input.shape[:2], *(1 for _ in input.shape[2:])) if channels else input.shape
        stream = keyed.Stream.DROPOUT + self.number + (call << _CALL_SHIFT)
        words = keyed.words(keys, stream, math.prod(shape) // len(keys))
        # A signed word is below this one in p of all cases.
        return (words >= min(round(self.p * 2**32) - 2**31, 2**31 - 1)).view(shape)

    def _again(self, calls: int) -> int:
        if calls == 1:
            return 0
        raise InputError(
            f"a dropout layer that is used {calls} times in a forward pass cannot be computed anew in backward "
            "(activation checkpointing): use a layer of its own in each place"
        )

    def _unknown(self, keys: Tensor | None, rows: int) -> None:
        if not self.automatic:
            known = "none are bound" if keys is None else f"{len(keys)} are bound for {rows} rows"
            raise InputError(
                f"Dropout needs the keys of its samples, and {known}: call lockstep.models.layers.bind first"
            )
        self.lost = True

    def _off(self) -> bool:
        return not self.training or self.p == 0


# Streams of the second call of a layer, and of later ones, are this many bits further on.
_CALL_SHIFT = 16


class Dropout(Keyed, nn.Dropout):
    """Each feature of each sample is zero with probability p, the others are divided by 1 - p."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__(p)
        if not 0 <= p < 1:
            raise ValueError(f"dropout p={p} is not from 0 to below 1")

    def forward(self, input: Tensor) -> Tensor:
        kept = None if self._off() else self._kept(input)
        if kept is None:
            return super().forward(input)
        return input * kept.to(input.dtype).mul_(1 / (1 - self.p))


class _ChannelDropout(Keyed):
    """Whole channels of a sample are zero; `dims`: of inputs with samples, others are a single sample's."""

    dims: tuple[int, ...] = ()

    def forward(self, input: Tensor) -> Tensor:
        kept = None
        if not self._off() and input.dim() in self.dims:
            kept = self._kept(input, channels=True)
        elif not self._off():
            self._unknown(None, 0)
        if kept is None:
            return super().forward(input)  # type: ignore[no-any-return]
        return input * kept.to(input.dtype).mul_(1 / (1 - self.p))


class Dropout1d(_ChannelDropout, nn.Dropout1d):
    dims = (3,)


class Dropout2d(_ChannelDropout, nn.Dropout2d):
    dims = (3, 4)


class Dropout3d(_ChannelDropout, nn.Dropout3d):
    dims = (5,)


class _AlphaDropout(Keyed):
    """What is dropped becomes the least value of SELU, then mean and variance are put right; as torch computes it."""

    channels = False

    def forward(self, input: Tensor) -> Tensor:
        kept = None if self._off() else self._kept(input, self.channels)
        if kept is None:
            return super().forward(input)  # type: ignore[no-any-return]
        alpha = 1.7580993408473766
        scale = 1 / math.sqrt((alpha * alpha * self.p + 1) * (1 - self.p))
        noise = kept.to(input.dtype)
        shift = (noise - 1).mul_(alpha * scale).add_(alpha * scale * self.p)
        return input * noise.mul_(scale) + shift


class AlphaDropout(_AlphaDropout, nn.AlphaDropout): ...


class FeatureAlphaDropout(_AlphaDropout, nn.FeatureAlphaDropout):
    channels = True


# torch's own layers, and what takes their place.
_KEYED: dict[type[nn.Module], type[Keyed]] = {
    nn.Dropout: Dropout,
    nn.Dropout1d: Dropout1d,
    nn.Dropout2d: Dropout2d,
    nn.Dropout3d: Dropout3d,
    nn.AlphaDropout: AlphaDropout,
    nn.FeatureAlphaDropout: FeatureAlphaDropout,
}


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
    """Make a model compute alike on all ranks where that can be done for it: keyed dropout in the place of torch's own, dense
    gradients, and statistics that DDP does not overwrite."""
    layer: Any
    for layer in model.modules():
        kind = _KEYED.get(type(layer))
        if kind and 0 < getattr(layer, "p", 0) < 1:  # what drops nothing, or all, is the same everywhere
            layer.__class__ = kind
            layer.automatic = True
        if type(layer) in (nn.Embedding, nn.EmbeddingBag) and layer.sparse:
            layer.sparse, layer.made_dense = False, True  # the same gradient, as every strategy and optimizer takes it
    # Each dropout layer has masks of its own.
    for number, layer in enumerate(layer for layer in model.modules() if isinstance(layer, Keyed)):
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
    return any(isinstance(layer, Keyed) and layer.p > 0 for layer in model.modules())


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
