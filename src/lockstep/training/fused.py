"""Whether a model gets Lockstep's own kernels, and what is said where it asked for them in vain (docs/kernels.md)."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.recipe import Recipe, fuses


def applied(recipe: Recipe, model: nn.Module, device: torch.device) -> nn.Module:
    """The model, with fused layers where its recipe has them."""
    if not fuses(recipe, device.type):
        return model
    from lockstep.kernels import fuse

    return fuse(model)


def remarks(recipe: Recipe, model: nn.Module) -> list[str]:
    """Why PyTorch's operators compute all the same."""
    if recipe.fused is False:
        return []
    from lockstep.kernels import FastConv, native

    fused = [module for module in model.modules() if isinstance(module, FastConv)]
    if recipe.fused == "auto":
        problem = native.problem() if fused else None
        return [f"fused=auto: PyTorch's own operators compute, since {problem}"] if problem else []
    if not fused:
        problem = "the model has no Conv2d that they compute (docs/kernels.md)"
    elif all(module.weight.device.type != "cpu" for module in fused):
        problem = "the fused kernels are for the CPU"
    else:
        problem = native.problem()
    return [f"warning: fused=true has no effect: {problem}"] if problem else []
