"""Where a restarted run goes on: weights, optimizer state and position, kept at the end of every epoch.

Written whole or not at all, read with `weights_only=True`. Only runs that may be restarted (`max_restarts`) write one.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from lockstep.run import Run, folder_error
from lockstep.training.optimizers import Optimizer

NAME = "checkpoint.pt"


@dataclass
class Position:
    """How far training had come."""

    epoch: int = 0
    steps: int = 0
    totals: dict[str, float] = field(default_factory=dict)


def save(run: Run, model: nn.Module, optimizer: Optimizer, position: Position) -> None:
    """Replace the checkpoint; the one before stays until the new one is safely on disk."""
    content = {"model": model.state_dict(), "optimizer": optimizer.state(), "position": asdict(position)}
    save_whole(run, NAME, content)


def save_whole(run: Run, name: str, content: Any) -> None:
    """A file of tensors in the run folder, whole or not at all."""
    temporary = run.folder / f".{name}.tmp"
    try:
        with temporary.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(run.folder / name)
    except OSError as error:
        raise folder_error(run.folder, error) from None


def load(run: Run, model: nn.Module, optimizer: Optimizer) -> Position:
    """Put weights and optimizer back where the last checkpoint was; a run without one starts at the beginning."""
    path = run.folder / NAME
    if not path.exists():
        return Position()
    content: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
    model.load_state_dict(content["model"])
    optimizer.load_state(content["optimizer"])
    return Position(**content["position"])
