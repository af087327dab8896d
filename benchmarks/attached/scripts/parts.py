"""What the scripts have in common: `SCRIPT.py STEPS PASSES`, in one process or as ranks of torchrun. Each step prints a line, if it is asked to."""

from __future__ import annotations

import os
import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

STEPS, PASSES = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
BATCH = 64
LINES = bool(os.environ.get("LINES"))
"""A race counts lines."""


def pictures(seed: int = 0) -> TensorDataset:
    """As many as are needed, over all ranks."""
    generator = torch.Generator().manual_seed(seed)
    held = min(STEPS, 200) * PASSES * BATCH * WORLD
    return TensorDataset(
        torch.randn(held, 3, 24, 24, generator=generator), torch.randint(0, 10, (held,), generator=generator)
    )


def convnet(width: int = 32) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(2 * width * 36, 256), nn.ReLU(), nn.Linear(256, 10),
    )  # fmt: skip


def stepped() -> None:
    if LINES and os.environ.get("RANK", "0") == "0":
        print("step", flush=True)
