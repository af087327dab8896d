"""The nets of the published experiments, as their reports describe them.

One thing is written in another order: where the reports have convolution, ReLU, max-pool, we have convolution, max-pool, ReLU.
The largest of four numbers, cut off at zero, is the largest of the four cut off at zero, and the gradient goes to the same
one of them, so every output and every gradient has the same bits (tests/test_models.py), for a quarter of the ReLU's work.
"""

from __future__ import annotations

import torch
from torch import nn


def mnist_convnet() -> nn.Module:
    """Document D: 4,266 parameters."""
    return nn.Sequential(
        *_conv_pool_relu(1, 4),
        *_conv_pool_relu(4, 8),
        nn.Flatten(),
        nn.Linear(8 * 7 * 7, 10),
    )


def cifar_vgg() -> nn.Module:
    """Document A: 2,625,962 parameters; every convolution 3x3 with padding 1 and a ReLU."""
    layers: list[nn.Module] = []
    channels = 3
    for first, second in ((32, 64), (128, 256), (256, 256)):
        layers += [nn.Conv2d(channels, first, 3, padding=1), nn.ReLU(), *_conv_pool_relu(first, second)]
        channels = second
    layers += [nn.Flatten(), nn.Linear(4096, 256), nn.ReLU(), nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 10)]
    return nn.Sequential(*layers)


def _conv_pool_relu(channels: int, width: int) -> list[nn.Module]:
    return [nn.Conv2d(channels, width, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()]


class TiedConv(nn.Module):
    """Document C: one convolution + ReLU applied k times with the same weights (k = 10 does not learn).

    The report states neither width nor head: 32 channels after a first convolution, and one linear layer, are ours.
    """

    def __init__(self, k: int = 2, channels: int = 32) -> None:
        super().__init__()
        if k < 1 or channels < 1:
            raise ValueError(f"k={k} and channels={channels} must be at least 1")
        self.k = k
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.tied = nn.Conv2d(channels, channels, 3, padding=1)
        self.head = nn.Linear(channels * 28 * 28, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = torch.relu(self.stem(images))
        for _ in range(self.k):
            features = torch.relu(self.tied(features))
        scores: torch.Tensor = self.head(features.flatten(1))
        return scores
