"""The nets of the published experiments, as their reports describe them.

One thing is written in another order: where the reports have convolution, ReLU, max-pool, we have convolution, max-pool, ReLU.
The largest of four numbers, cut off at zero, is the largest of the four cut off at zero, and the gradient goes to the same
one of them, so every output and every gradient has the same bits (tests/test_models.py), for a quarter of the ReLU's work.
Batch norm, where a recipe asks for it, follows the convolution, so the same holds behind it. Dropout precedes each linear layer.
Neither draws a number, so a seed's first weights are the same with and without them. A convolution before batch norm has no bias:
the mean takes it out again, and what is left of its gradient is rounding, which Adam would blow up to whole steps.
"""

from __future__ import annotations

import torch
from torch import nn

from lockstep.models.layers import BatchNorm2d, Dropout


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


def _conv(channels: int, width: int, batch_norm: str, pool: bool = False) -> list[nn.Module]:
    pools = [nn.MaxPool2d(2)] if pool else []
    return [_plain_conv(channels, width, batch_norm), *_norm(width, batch_norm), *pools, nn.ReLU()]


def _plain_conv(channels: int, width: int, batch_norm: str) -> nn.Conv2d:
    conv = nn.Conv2d(channels, width, 3, padding=1)
    if batch_norm != "off":  # taken away afterwards, so that the numbers that were drawn for it are drawn
        conv.register_parameter("bias", None)
    return conv


def _linear(features: int, width: int, dropout: float) -> list[nn.Module]:
    return [*([Dropout(dropout)] if dropout else []), nn.Linear(features, width)]


def _norm(channels: int, batch_norm: str) -> list[nn.Module]:
    if batch_norm not in ("off", "synchronised", "per-rank"):
        raise ValueError(f"batch_norm={batch_norm} is none of off, synchronised, per-rank")
    return [] if batch_norm == "off" else [BatchNorm2d(channels, synchronised=batch_norm == "synchronised")]


class TiedConv(nn.Module):
    """Document C: one convolution + ReLU applied k times with the same weights (k = 10 does not learn).

    The report states neither width nor head: 32 channels after a first convolution, and one linear layer, are ours.
    With batch norm, each of the k applications has one of its own: what they normalise is distributed differently.
    """

    def __init__(self, k: int = 2, channels: int = 32, *, dropout: float = 0.0, batch_norm: str = "off") -> None:
        super().__init__()
        if k < 1 or channels < 1:
            raise ValueError(f"k={k} and channels={channels} must be at least 1")
        self.k = k
        self.stem = _plain_conv(1, channels, batch_norm)
        self.tied = _plain_conv(channels, channels, batch_norm)
        self.norms = nn.ModuleList(layer for _ in range(k + 1) for layer in _norm(channels, batch_norm))
        self.head = (
            nn.Sequential(*_linear(channels * 28 * 28, 10, dropout)) if dropout else nn.Linear(channels * 28 * 28, 10)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = images
        for step in range(self.k + 1):
            features = self.tied(features) if step else self.stem(features)
            features = torch.relu(self.norms[step](features) if len(self.norms) else features)
        scores: torch.Tensor = self.head(features.flatten(1))
        return scores
