"""Strategies: how the ranks' gradients become one. Each is small enough to read in one go.

A strategy of your own is a class with the members of `Strategy`, named as path/to/file.py:Class.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import nn

from lockstep.parallel.flat import Flat
from lockstep.placement import Placement
from lockstep.plugins import load_object


class Strategy(Protocol):
    """What the training loop needs of a strategy."""

    gradient_scale: float
    """What the local loss is multiplied with, so that the exchanged gradient is the sum over all samples."""
    model: nn.Module
    """What the loop calls forward on."""

    exchange: Callable[[], None] | None
    """Called after the last backward of a step, by strategies that do not exchange during backward."""

    def no_exchange(self) -> AbstractContextManager[None]:
        """Forward and backward inside it keep their gradients to themselves (inner steps of an accumulation)."""


class Single:
    """One process: nothing to exchange."""

    exchange: Callable[[], None] | None = None

    def __init__(self, model: nn.Module, placement: Placement, device: torch.device) -> None:
        self.model = model
        self.gradient_scale = 1.0

    def no_exchange(self) -> AbstractContextManager[None]:
        return nullcontext()


class Ddp:
    """PyTorch's DistributedDataParallel. It averages over ranks; we want the sum, hence the scale."""

    exchange: Callable[[], None] | None = None

    def __init__(self, model: nn.Module, placement: Placement, device: torch.device) -> None:
        self.model: nn.Module = nn.parallel.DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,
        )
        self.gradient_scale = float(placement.ranks)

    def no_exchange(self) -> AbstractContextManager[None]:
        assert isinstance(self.model, nn.parallel.DistributedDataParallel)
        context: AbstractContextManager[None] = self.model.no_sync()
        return context


STRATEGIES: dict[str, Callable[[nn.Module, Placement, torch.device], Strategy]] = {
    "single": Single,
    "ddp": Ddp,
    "flat": Flat,
}


def build(name: str, model: nn.Module, placement: Placement, device: torch.device) -> Strategy:
    kind = STRATEGIES[name] if name in STRATEGIES else load_object(name, option="strategy")
    strategy: Strategy = kind(model, placement, device)
    return strategy
