"""What the scripts share: pictures, nets, and the lines that TraceML's documentation asks a loop to add, which do nothing without it.

Lightning and the Trainer need none of them: `traceml run` knows both.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

PEER = bool(os.environ.get("PLANTED_TRACEML"))


class Pictures(Dataset[Any]):
    """They stay in memory, and whole batches are taken from them, so that the loader takes next to nothing."""

    def __init__(self, count: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.randn(count, 1, 28, 28, generator=generator)
        self.labels = torch.randint(0, 10, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        return self.images[index], self.labels[index]

    def __getitems__(self, indices: list[int]) -> Any:
        return self.images[indices], self.labels[indices]


def collate(batch: Any) -> Any:
    """It is one already."""
    return batch


class Net(nn.Module):
    """Few weights and much to compute. `layers`: small layers behind it, whose gradients fill many buckets."""

    def __init__(self, layers: int = 0) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 16, 3, padding=1, stride=2)
        self.widen = nn.Linear(16, 64)
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers)))
        self.last = nn.Linear(64, 10)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        hidden = functional.relu(self.second(functional.relu(self.first(pictures))))
        return self.last(self.layers(self.widen(hidden.mean((2, 3)))))


def begin() -> None:
    if PEER:
        import traceml_ai as traceml

        traceml.init(mode="auto")


def step(model: nn.Module) -> Any:
    """Around each step of a loop of one's own."""
    if PEER:
        import traceml_ai as traceml

        return traceml.trace_step(model)
    return nullcontext()
