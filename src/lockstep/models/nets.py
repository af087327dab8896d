"""The nets of the published experiments, as their reports describe them.

One order differs: where the reports have convolution, ReLU, max-pool, we have convolution, max-pool, ReLU. ReLU of the largest
of four numbers is the largest of their ReLUs, and the gradient goes to the same one of them, so every output and every gradient
has the same bits (tests/test_models.py), for a quarter of the ReLU's work. Batch norm, where a recipe asks for it, follows the
convolution, so the same holds behind it. Dropout precedes each linear layer. Neither draws a number, so a seed's first weights
are the same with and without them. A convolution before batch norm has no bias: the mean removes it again, and its remaining
gradient is rounding, which Adam would amplify to whole steps.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from lockstep.models.layers import BatchNorm2d, Dropout
from lockstep.torch_private import convolution_backward, without_onednn


def mnist_convnet(*, dropout: float = 0.0, batch_norm: str = "off") -> nn.Module:
    """Document D: 4,266 parameters."""
    return nn.Sequential(
        *_conv(1, 4, batch_norm, pool=True),
        *_conv(4, 8, batch_norm, pool=True),
        nn.Flatten(),
        *_linear(8 * 7 * 7, 10, dropout),
    )


def cifar_vgg(*, dropout: float = 0.0, batch_norm: str = "off") -> nn.Module:
    """Document A: 2,625,962 parameters; every convolution 3x3 with padding 1 and a ReLU."""
    layers: list[nn.Module] = []
    channels = 3
    for first, second in ((32, 64), (128, 256), (256, 256)):
        layers += [*_conv(channels, first, batch_norm), *_conv(first, second, batch_norm, pool=True)]
        channels = second
    layers += [nn.Flatten(), *_linear(4096, 256, dropout), nn.ReLU(), *_linear(256, 32, dropout), nn.ReLU()]
    return nn.Sequential(*layers, *_linear(32, 10, dropout))


def _conv(channels: int, out_channels: int, batch_norm: str, pool: bool = False) -> list[nn.Module]:
    pools = [nn.MaxPool2d(2)] if pool else []
    return [_plain_conv(channels, out_channels, batch_norm), *_norm(out_channels, batch_norm), *pools, nn.ReLU()]


def _plain_conv(channels: int, out_channels: int, batch_norm: str, kind: type[nn.Conv2d] = nn.Conv2d) -> nn.Conv2d:
    conv = kind(channels, out_channels, 3, padding=1)
    if batch_norm != "off":  # removed afterwards, so that the generator advances as with a bias
        conv.register_parameter("bias", None)
    return conv


def _linear(features: int, out_features: int, dropout: float) -> list[nn.Module]:
    return [*([Dropout(dropout)] if dropout else []), nn.Linear(features, out_features)]


def _norm(channels: int, batch_norm: str) -> list[nn.Module]:
    if batch_norm not in ("off", "synchronised", "per-rank"):
        raise ValueError(f"batch_norm={batch_norm} is not one of off, synchronised, per-rank")
    return [] if batch_norm == "off" else [BatchNorm2d(channels, synchronised=batch_norm == "synchronised")]


class TiedConv(nn.Module):
    """Document C: one convolution + ReLU applied k times with the same weights (k = 10 does not learn).

    The report states neither width nor head: 32 channels after a first convolution, and one linear layer, are ours.
    With batch norm, each of the k applications has its own layer: their inputs are distributed differently.
    Three things may be changed, one at a time, to see what each does: tied=False gives every application weights of its own,
    init="he" draws weights that keep the size of the activations, and onednn=False computes the convolutions without oneDNN.
    """

    def __init__(
        self,
        k: int = 2,
        channels: int = 32,
        *,
        tied: bool = True,
        init: str = "torch",
        onednn: bool = True,
        dropout: float = 0.0,
        batch_norm: str = "off",
    ) -> None:
        super().__init__()
        if k < 1 or channels < 1:
            raise ValueError(f"k={k} and channels={channels} must be at least 1")
        if init not in ("torch", "he"):
            raise ValueError(f"init={init} is not one of torch, he")
        self.k = k
        conv = partial(_plain_conv, batch_norm=batch_norm, kind=nn.Conv2d if onednn else ConvWithoutOneDnn)
        self.stem = conv(1, channels)
        self.tied = conv(channels, channels) if tied else None
        self.untied = nn.ModuleList(conv(channels, channels) for _ in range(0 if tied else k))
        self.norms = nn.ModuleList(layer for _ in range(k + 1) for layer in _norm(channels, batch_norm))
        self.head = (
            nn.Sequential(*_linear(channels * 28 * 28, 10, dropout)) if dropout else nn.Linear(channels * 28 * 28, 10)
        )
        if init == "he":
            for layer in (self.stem, self.tied, *self.untied):
                _draw_as_he(layer)

    def convolutions_before_relu(self) -> list[str]:
        """For `lockstep.kernels.fuse`: batch norm stands between the two."""
        if len(self.norms):
            return []
        return ["stem", "tied"] if self.tied is not None else ["stem", *(f"untied.{i}" for i in range(self.k))]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = images
        later: list[nn.Module] = list(self.untied) if self.tied is None else [self.tied] * self.k
        for step, conv in enumerate([self.stem, *later]):
            features = conv(features)
            if len(self.norms):
                features = self.norms[step](features)
            if not getattr(conv, "applies_relu", False):
                features = torch.relu(features)
        scores: torch.Tensor = self.head(features.flatten(1))
        return scores


def _draw_as_he(conv: nn.Module | None) -> None:
    """PyTorch's own weights make the activations behind a ReLU 0.4 times as large in every layer; these keep their size."""
    if isinstance(conv, nn.Conv2d):
        nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
        if conv.bias is not None:
            nn.init.zeros_(conv.bias)


class ConvWithoutOneDnn(nn.Conv2d):
    """A 3x3 convolution with padding 1 by PyTorch's own code, in both directions, as if it had been built without oneDNN."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _WithoutOneDnn.apply(input, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return result


class _WithoutOneDnn(torch.autograd.Function):
    """PyTorch's switch is global to the process, and the library for a gradient is chosen only when it is computed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        with without_onednn():
            return torch.conv2d(x, weight, bias, padding=1)

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ones = [1, 1]
        with without_onednn():
            grads: tuple[torch.Tensor | None, ...] = convolution_backward(
                outer[0], x, weight, [weight.shape[0]], ones, ones, ones, False, [0, 0], 1,
                [ctx.needs_input_grad[0], True, ctx.biased],
            )  # fmt: skip
        return grads
