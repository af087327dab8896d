"""The strategy `dp`: PyTorch's DataParallel, one process that divides each batch over the GPUs it sees.

It is here because the published experiments compare it. PyTorch itself advises against it: the weights are copied to every
GPU anew in each step, and one Python process drives all of them. Written for CUDA and not yet run on one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from lockstep.errors import InputError
from lockstep.placement import Placement


class DataParallel:
    """The gradients of all GPUs are added up on the first one, so nothing is left to exchange."""

    exchange: Callable[[], None] | None = None

    def __init__(self, model: nn.Module, placement: Placement, device: torch.device) -> None:
        check(placement, device.type, torch.cuda.device_count() if device.type == "cuda" else 0)
        self.model: nn.Module = nn.DataParallel(model)
        self.gradient_scale = 1.0

    def no_exchange(self) -> AbstractContextManager[None]:
        return nullcontext()


def check(placement: Placement, device: str, devices: int) -> None:
    """Refuse what DataParallel cannot do; it would otherwise run the bare model and say nothing."""
    if device != "cuda":
        raise InputError(
            "strategy=dp divides a batch over the GPUs of one process, and a CPU is one device, whose cores threads=N "
            "already uses: choose strategy=ddp with ranks=2, or leave strategy out"
        )
    if placement.ranks > 1:
        raise InputError(f"strategy=dp is one process, not ranks={placement.ranks}: choose ranks=1, or strategy=ddp")
    if devices < 2:
        raise InputError("strategy=dp needs several GPUs, and this process sees one: leave strategy out")
