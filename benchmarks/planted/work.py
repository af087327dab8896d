"""The work that causes are planted into: a small net on random pictures, with few weights, so that its own exchange is short."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

BATCH, STEPS_PER_EPOCH, EPOCHS = 512, 20, 10
SAMPLES = BATCH * STEPS_PER_EPOCH


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 16, 3, padding=1, stride=2)
        self.last = nn.Linear(16, 10)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        hidden = functional.relu(self.second(functional.relu(self.first(pictures))))
        return self.last(hidden.mean((2, 3)))


class Many(nn.Module):
    """The same with many small layers behind it: gradients for many buckets."""

    def __init__(self, layers: int = 64, width: int = 64) -> None:
        super().__init__()
        self.net = Net()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        self.widen, self.last = nn.Linear(10, width), nn.Linear(width, 10)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        return self.last(self.layers(self.widen(self.net(pictures))))


def net() -> nn.Module:
    return Net()


def many() -> nn.Module:
    return Many()


def pictures() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(SAMPLES, 1, 28, 28), torch.randint(0, 10, (SAMPLES,))
