"""What of a user's model ranks compute otherwise than one process does, found by looking at it and by trying it once.

Dropout is made alike (layers.py). Statistics of each rank's own samples, and numbers that forward draws from a generator or
writes into a buffer, cannot be.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lockstep import keyed, seeding
from lockstep.data.inputs import Inputs, samples
from lockstep.models import layers
from lockstep.models.calling import call
from lockstep.torch_private import AnyBatchNorm


def remarks(model: nn.Module) -> list[str]:
    """What was changed in the model so that ranks compute the same; one line each."""
    dropout = [name for name, layer in model.named_modules() if isinstance(layer, layers.Keyed) and layer.automatic]
    dense = [name for name, layer in model.named_modules() if getattr(layer, "made_dense", False)]
    found = []
    if dropout:
        found.append(
            f"dropout ({_names(dropout)}) draws from (seed, epoch, sample), so that ranks drop what one process would"
        )
    if dense:
        found.append(f"gradients of {_names(dense)} are dense: sparse=True has no effect")
    return found


def cautions(
    model: nn.Module, images: Inputs | None = None, forward: Callable[[nn.Module, Inputs], Any] | None = None
) -> list[str]:
    """Why N ranks may compute something other than one; one line each.

    With `images`, a copy of the model is tried on them in training mode, called through `forward` if that is given.
    """
    norms = [name for name, layer in model.named_modules() if _per_rank(layer)]
    found = []
    if norms:
        found.append(
            f"batch norm ({_names(norms)}) takes its statistics from each rank's own samples: "
            "lockstep.models.layers.BatchNorm2d takes them from all"
        )
    if images is not None:
        found += _tried(copy.deepcopy(model).train(), images, forward or call)
    return found


def _tried(model: nn.Module, images: Inputs, forward: Callable[[nn.Module, Inputs], Any]) -> list[str]:
    known = {
        f"{name}.{buffer}"
        for name, layer in model.named_modules()
        if isinstance(layer, AnyBatchNorm)
        for buffer, _ in layer.named_buffers()
    }
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers() if name not in known}
    before = seeding.state()
    layers.bind(keyed.sample_keys(0, 1, torch.arange(samples(images))), None)
    try:
        with torch.no_grad():
            forward(model, images)
        drawn = seeding.changed(before)
    finally:
        layers.bind(None, None)
        seeding.load_state(before)
    found = unkeyed(model)
    if drawn and not found:
        found.append(
            f"forward draws from {' and '.join(drawn)} (a dropout function, noise): each rank draws its own numbers; "
            "lockstep.models.layers.Dropout draws by the sample"
        )
    written = [name for name, buffer in model.named_buffers() if name in buffers and not _equal(buffers[name], buffer)]
    if written:
        found.append(
            f"forward writes buffers ({_names(written)}): each rank writes what its own samples give, and the first one's count"
        )
    return found


def unkeyed(model: nn.Module) -> list[str]:
    """Dropout layers that could not draw by the sample in a past forward pass."""
    lost = [name for name, layer in model.named_modules() if isinstance(layer, layers.Keyed) and layer.lost]
    text = (
        f"dropout ({_names(lost)}) has inputs whose first dimension is not the samples: each rank draws its own masks"
    )
    return [text] if lost else []


def _per_rank(layer: nn.Module) -> bool:
    if isinstance(layer, layers.BatchNorm2d):
        return not layer.synchronised
    return isinstance(layer, AnyBatchNorm) and not isinstance(layer, nn.SyncBatchNorm)


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(torch.equal(one.nan_to_num(), other.nan_to_num()))


def _names(names: list[str], most: int = 4) -> str:
    shown = [name or "the model itself" for name in names[:most]]
    return ", ".join(shown) + (f" and {len(names) - most} more" if len(names) > most else "")
