"""A strategy that exchanges nothing: two ranks that only share the machine. What the machine allows, not a way to train."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from lockstep.placement import Placement


class NoExchange:
    exchange = None

    def __init__(self, model: nn.Module, placement: Placement, device: torch.device) -> None:
        self.model = model
        self.gradient_scale = float(placement.ranks)

    def no_exchange(self) -> AbstractContextManager[None]:
        return nullcontext()
