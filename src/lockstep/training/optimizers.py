"""Optimizers by the recipe's name, in PyTorch's fused form: one kernel for all parameters, on CPU too."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from lockstep.recipe import Optimizer


def build(settings: Optimizer, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    chosen = [p for p in parameters if p.requires_grad]
    # The fused kernels take real floating-point parameters only; anything else goes the ordinary way.
    fused = all(p.is_floating_point() for p in chosen)
    if settings.name == "adam":
        return torch.optim.Adam(
            chosen,
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=fused,
        )
    return torch.optim.SGD(
        chosen,
        lr=settings.lr,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        nesterov=settings.nesterov and settings.momentum > 0,
        fused=fused,
    )
