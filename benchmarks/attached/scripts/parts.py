"""What the scripts have in common: `SCRIPT.py STEPS PASSES`, in one process or as ranks of torchrun."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

STEPS, PASSES = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
BATCH = 64
WIDTH = int(os.environ.get("WIDTH", "32"))
SWITCHED = os.environ.get("SWITCHED", "")
"""The file for the windows with and without hooks (switch.py); so many of them."""
WINDOWS = int(os.environ.get("WINDOWS", "0"))


def pictures(seed: int = 0) -> TensorDataset:
    """As many as are needed, over all ranks."""
    generator = torch.Generator().manual_seed(seed)
    held = min(STEPS, 200) * PASSES * BATCH * WORLD
    return TensorDataset(
        torch.randn(held, 3, 24, 24, generator=generator), torch.randint(0, 10, (held,), generator=generator)
    )


def convnet(width: int = WIDTH) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(2 * width * 36, 8 * width), nn.ReLU(), nn.Linear(8 * width, 10),
    )  # fmt: skip


def stepped() -> None:
    """Called after each step by the scripts whose hooks are measured."""
    if _switch is not None:
        _switch.stepped()


def _switched() -> Any:
    if not SWITCHED:
        return None
    from switch import Switch

    return Switch(SWITCHED, WINDOWS)


_switch = _switched()
