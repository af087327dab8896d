"""The strategy `dp`: PyTorch's DataParallel, one process that divides each batch over the GPUs it sees.

It is here because the published experiments compare it. PyTorch itself advises against it: the weights are copied to every
GPU anew in each step, and one Python process drives all of them. Written for CUDA and not yet run on one.
"""

from __future__ import annotations

import torch
from torch import nn

from lockstep.errors import InputError
from lockstep.placement import Placement
from lockstep.strategies.base import Strategy


class DataParallel(Strategy):
    """The gradients of all GPUs are added up on the first one, so nothing is left to exchange."""

    def __init__(self, model: nn.Module, placement: Placement, device: torch.device) -> None:
        if torch.cuda.device_count() < 2:  # DataParallel would run the bare model and say nothing
            raise InputError("strategy=dp needs several GPUs, and this process sees one: leave strategy out")
        super().__init__(model, placement, device)
        self.model = nn.DataParallel(model)
