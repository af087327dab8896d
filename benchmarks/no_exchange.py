"""A strategy that exchanges nothing: two ranks that only share the machine. What the machine allows, not a way to train."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.placement import Placement
from lockstep.strategies import Strategy


class NoExchange(Strategy):
    def __init__(self, model: nn.Module, placement: Placement, device: torch.device) -> None:
        super().__init__(model, placement, device)
        self.gradient_scale = float(placement.ranks)
