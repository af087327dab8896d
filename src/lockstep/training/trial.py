"""A few passes of a user's own model before training: what no look at the model tells, and what a strategy has to know of it.

Which parameters get no gradient decides `ddp.find_unused_parameters=auto`. A sparse gradient is made dense: no bucket holds one.
Every rank tries the same samples with the same weights and draws, so that all come to the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from lockstep import keyed, models, seeding
from lockstep.data.batches import Batch, Batches
from lockstep.errors import InputError, first_line
from lockstep.models import layers
from lockstep.models.calling import call
from lockstep.placement import Placement
from lockstep.recipe import Recipe
from lockstep.training.loss import Loss
from lockstep.training.precision import Precision

# Samples of a pass: one would be too few for batch norm. Several passes show a model that takes different branches for different samples.
SAMPLES, PASSES = 2, 4


class Trial(NamedTuple):
    """Names of parameters, in the model's order."""

    unused: list[str]
    """Without a gradient in some pass."""
    varying: list[str]
    """Without a gradient in some pass, and with one in another."""
    sparse: list[str]
    failed: str = ""


def settle(
    recipe: Recipe, placement: Placement, model: nn.Module, batches: Batches, precision: Precision, loss: Loss
) -> tuple[Placement, list[str]]:
    """The placement with what the trial decides, and what is to be said of it. The model's sparse gradients are dense from here on."""
    if recipe.model in models.CATALOGUE:  # they use all their parameters in every step, densely
        return placement, []

    def passed(tried: nn.Module, number: int) -> Tensor:
        first = SAMPLES * number
        images, labels = batches.take(first, first + SAMPLES)
        layers.bind(keyed.sample_keys(recipe.seed, 1, torch.arange(first, first + len(labels))), None)
        with precision.context():
            return loss(precision.scores(call(tried, precision.images(images))), Batch(images, labels))

    with seeding.seeded(recipe.seed):
        try:
            found = try_passes(model, passed, max(1, min(PASSES, batches.count // SAMPLES)))
        finally:
            layers.bind(None, None)
    said = _make_dense(model, placement, found.sparse)
    _check_fsdp(placement, found)
    return _with_unused(placement, found, said)


def try_passes(model: nn.Module, loss: Callable[[nn.Module, int], Tensor], passes: int) -> Trial:
    """Forward and backward passes, each of a fresh copy."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    absent: list[set[str]] = []
    sparse: set[str] = set()
    for number in range(passes):
        tried = copy.deepcopy(model).train()
        parameters = [parameter for parameter in tried.parameters() if parameter.requires_grad]
        try:
            gradients = torch.autograd.grad(loss(tried, number), parameters, allow_unused=True)
        except Exception as error:  # a user's code may raise anything, and may well want a whole batch
            return Trial([], [], [], first_line(error))
        pairs = list(zip(names, gradients, strict=True))
        absent.append({name for name, gradient in pairs if gradient is None})
        sparse |= {name for name, gradient in pairs if gradient is not None and gradient.is_sparse}
    ever, always = set().union(*absent), set.intersection(*absent)
    return Trial(
        [name for name in names if name in ever],
        [name for name in names if name in ever - always],
        [name for name in names if name in sparse],
    )


def _make_dense(model: nn.Module, placement: Placement, sparse: list[str]) -> list[str]:
    """Have these parameters get dense gradients; returns what is to be said of it."""
    if not sparse:
        return []
    if placement.strategy == "fsdp":
        raise InputError(
            f"strategy=fsdp: the gradient of {sparse[0]} is sparse (functional.embedding with sparse=True): "
            "use nn.Embedding, whose gradient is made dense, or choose strategy=ddp"
        )
    for name in sparse:
        model.get_parameter(name).register_post_accumulate_grad_hook(dense)  # type: ignore[no-untyped-call]
    return [f"gradients of {_some(sparse)} are dense: sparse=True has no effect"]


def dense(parameter: Tensor) -> None:
    """A hook: it comes before DDP's own."""
    if parameter.grad is not None and parameter.grad.is_sparse:
        parameter.grad = parameter.grad.to_dense()


def _check_fsdp(placement: Placement, found: Trial) -> None:
    """Ranks that call different layers would gather weights that do not belong together, or wait for each other."""
    if placement.strategy == "fsdp" and found.varying:
        raise InputError(
            f"strategy=fsdp: {_some(found.varying)} got a gradient from some samples of a trial and none from others, "
            "and ranks gather layers together: choose strategy=ddp or flat"
        )


def _with_unused(placement: Placement, found: Trial, said: list[str]) -> tuple[Placement, list[str]]:
    ddp, key = placement.ddp, "ddp.find_unused_parameters"
    asked = placement.strategy == "ddp" and ddp.find_unused_parameters == "auto"
    if not asked or ddp.static_graph:  # DDP learns a static graph, with what is not used, from its first step
        return placement, said
    if found.failed:
        said = [*said, f"{key}=false: a trial pass of {SAMPLES} samples failed, and told nothing ({found.failed})"]
    elif found.unused:
        said = [
            *said,
            f"{key}=true: a trial pass gave {_some(found.unused)} no gradient; DDP looks for such parameters after every forward pass",
        ]
    chosen = msgspec.structs.replace(ddp, find_unused_parameters=bool(found.unused))
    return msgspec.structs.replace(placement, ddp=chosen), said


def _some(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
