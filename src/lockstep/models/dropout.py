"""torch's dropout layers, with masks that depend on (seed, epoch, sample, layer, call, feature) alone."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lockstep import keyed
from lockstep.errors import InputError
from lockstep.models.samples import bound
from lockstep.torch_private import current_graph_task_id

# The index of a repeated call is added to the stream's number, shifted left by this many bits.
_CALL_SHIFT = 16


class Keyed(nn.Module):
    """A dropout layer of torch's with masks of ours. The first dimension is the samples, or several rows of each sample, one sample
    after the other. No dropout in eval mode."""

    p: float
    channels = False
    """Drop whole channels of a sample."""
    dims: tuple[int, ...] = ()
    """The numbers of dimensions that a batched input may have, if not any: another input is a single sample."""
    number = 0
    """Which dropout layer of its model this is (`layers.prepare`)."""
    automatic = False
    """It replaces one of torch's own layers (`layers.prepare`): if its samples cannot be identified, it draws as that layer does."""
    lost = False
    """It is automatic, and its samples could not be identified."""

    def forward(self, input: Tensor) -> Tensor:
        kept = self._kept(input) if self.training and self.p > 0 else None
        result: Tensor = super().forward(input) if kept is None else self._masked(input, kept)
        return result

    def _masked(self, input: Tensor, kept: Tensor) -> Tensor:
        """Zero, or divided by 1 - p."""
        return input * kept.to(input.dtype).mul_(1 / (1 - self.p))

    def _kept(self, input: Tensor) -> Tensor | None:
        """Which features of each sample, or which of its channels, are kept; in a shape that broadcasts to the input's."""
        keys, rows = bound.keys, len(input) if input.dim() else 0
        if keys is None or rows == 0 or rows % len(keys) or (self.dims and input.dim() not in self.dims):
            self._unknown(keys, rows)
            return None
        call = bound.calls.get(self.number, 0)
        if torch.compiler.is_compiling() or current_graph_task_id() == -1:
            bound.calls[self.number] = call + 1
        elif call == 1:  # activation checkpointing recomputes it within backward
            call = 0
        else:
            raise InputError(
                f"a dropout layer that is used {call} times in a forward pass cannot be computed anew in backward "
                "(activation checkpointing): use a layer of its own in each place"
            )
        shape = (*input.shape[:2], *(1 for _ in input.shape[2:])) if self.channels else input.shape
        stream = keyed.Stream.DROPOUT + self.number + (call << _CALL_SHIFT)
        words = keyed.words(keys, stream, math.prod(shape) // len(keys))
        # A random signed word is below this one with probability p.
        return (words >= min(round(self.p * 2**32) - 2**31, 2**31 - 1)).view(shape)

    def _unknown(self, keys: Tensor | None, rows: int) -> None:
        if not self.automatic:
            known = "none are bound" if keys is None else f"{len(keys)} are bound for {rows} rows"
            raise InputError(
                f"Dropout needs the keys of its samples, and {known}: call lockstep.models.layers.bind first"
            )
        self.lost = True


class Dropout(Keyed, nn.Dropout):
    """Each feature of each sample is zero with probability p, the others are divided by 1 - p."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__(p)
        if not 0 <= p < 1:
            raise ValueError(f"dropout p={p} is not from 0 to below 1")


class Dropout1d(Keyed, nn.Dropout1d):
    channels, dims = True, (3,)


class Dropout2d(Keyed, nn.Dropout2d):
    channels, dims = True, (3, 4)


class Dropout3d(Keyed, nn.Dropout3d):
    channels, dims = True, (5,)


class _Alpha(Keyed):
    """Dropped values become SELU's minimum, then mean and variance are corrected, as in torch."""

    def _masked(self, input: Tensor, kept: Tensor) -> Tensor:
        alpha = 1.7580993408473766
        scale = 1 / math.sqrt((alpha * alpha * self.p + 1) * (1 - self.p))
        noise = kept.to(input.dtype)
        shift = (noise - 1).mul_(alpha * scale).add_(alpha * scale * self.p)
        return input * noise.mul_(scale) + shift


class AlphaDropout(_Alpha, nn.AlphaDropout): ...


class FeatureAlphaDropout(_Alpha, nn.FeatureAlphaDropout):
    channels = True


# torch's own layers and their replacements.
KEYED: dict[type[nn.Module], type[Keyed]] = {
    nn.Dropout: Dropout,
    nn.Dropout1d: Dropout1d,
    nn.Dropout2d: Dropout2d,
    nn.Dropout3d: Dropout3d,
    nn.AlphaDropout: AlphaDropout,
    nn.FeatureAlphaDropout: FeatureAlphaDropout,
}
