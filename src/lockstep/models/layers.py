"""Dropout and batch norm that compute the same on every placement; for the published nets and for a user's own.

The training step calls `bind` before each forward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep.models.batch_norm import BatchNorm2d, world_size
from lockstep.models.dropout import KEYED, Dropout, Keyed
from lockstep.models.samples import bind
from lockstep.torch_private import AnyBatchNorm, ddp_ignore

__all__ = [
    "BatchNorm2d",
    "Dropout",
    "Keyed",
    "average_statistics",
    "bind",
    "needs_keys",
    "prepare",
    "synchronises",
]


def prepare(model: nn.Module) -> None:
    """Make a model compute the same on all ranks where possible: keyed dropout in place of torch's own, dense gradients,
    and statistics that DDP does not overwrite."""
    layer: Any
    for layer in model.modules():
        kind = KEYED.get(type(layer))
        if kind and 0 < getattr(layer, "p", 0) < 1:  # a layer that drops nothing or everything is the same everywhere
            layer.__class__ = kind
            layer.automatic = True
        if type(layer) in (nn.Embedding, nn.EmbeddingBag) and layer.sparse:
            # The same gradient, in the form that every strategy and optimizer takes.
            layer.sparse, layer.made_dense = False, True
    # Each dropout layer has its own masks.
    for number, layer in enumerate(layer for layer in model.modules() if isinstance(layer, Keyed)):
        layer.number = number
    norms = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, BatchNorm2d)]
    names = [f"{name}.{buffer}" if name else buffer for name, layer in norms for buffer, _ in layer.named_buffers()]
    if names:
        # DDP would send rank 0's statistics to all before every forward pass, and so lose the other ranks' (`average_statistics`).
        ddp_ignore(model, names)


def needs_keys(model: nn.Module) -> bool:
    """Whether a training pass of this model needs the keys of its samples."""
    return any(isinstance(layer, Keyed) and layer.p > 0 for layer in model.modules())


def synchronises(model: nn.Module) -> bool:
    """Whether ranks exchange data in each forward pass, so that all have to make the same number of passes."""
    return any(isinstance(layer, BatchNorm2d) and layer.synchronised for layer in model.modules())


@torch.no_grad()
def average_statistics(model: nn.Module) -> None:
    """Collective: give all ranks the same running statistics, the mean of theirs, and the highest count of passes.

    Called before evaluation and checkpoints.

    Synchronised layers have the same ones already, and a model without batch norm has none: then nothing is sent.
    """
    if world_size() == 1:
        return
    own = [
        layer
        for layer in model.modules()
        if isinstance(layer, AnyBatchNorm) and not (isinstance(layer, BatchNorm2d) and layer.synchronised)
    ]
    found = [s for layer in own for s in (layer.running_mean, layer.running_var) if s is not None]
    if not found:
        return
    together = torch.cat([statistic.double() for statistic in found])
    dist.all_reduce(together)
    together /= world_size()
    for statistic, mean in zip(found, torch.split(together, [len(statistic) for statistic in found]), strict=True):
        statistic.copy_(mean)
    # Ranks may have made different numbers of passes: the last, partial batch need not fill all of every rank's micro batches.
    counters = [layer.num_batches_tracked for layer in own if layer.num_batches_tracked is not None]
    passes = torch.stack(counters)
    dist.all_reduce(passes, op=dist.ReduceOp.MAX)
    for counter, count in zip(counters, passes, strict=True):
        counter.copy_(count)
