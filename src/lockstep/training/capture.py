"""What is kept of a model: its weights at the end, and for `lockstep verify` the gradients of the first step."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from lockstep.data.batches import Batches, sample_order
from lockstep.parallel.ranks import Rank
from lockstep.run import Run, Spec, folder_error
from lockstep.training.checkpoint import save_whole
from lockstep.training.step import Stepper


def gradients(run: Run, rank: Rank, model: nn.Module, stepper: Stepper, train: Batches, spec: Spec) -> None:
    """The exchanged gradients of the first global batch and of the last, partial one, at the initial weights."""
    plan, recipe = spec.plan, spec.recipe
    train.visit(sample_order(recipe, 1, plan.train_samples) if recipe.shuffle else None, 1)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    last = (plan.steps_per_epoch - 1) * plan.global_batch
    for label, first, count in (
        ("first", 0, min(plan.global_batch, plan.train_samples)),
        ("last", last, plan.last_batch),
    ):
        found = stepper.gradients_only(first, count)
        if rank.is_first:
            arrays = {name: gradient.float().cpu().numpy() for name, gradient in zip(names, found, strict=True)}
            np.savez(run.folder / f"gradients-{label}.npz", **arrays)  # type: ignore[arg-type]


def weights(run: Run, state: dict[str, torch.Tensor]) -> None:
    """The trained weights, whole or not at all."""
    try:
        save_whole(run.folder / "model.pt", {name: tensor.cpu().contiguous() for name, tensor in state.items()})
    except OSError as error:
        raise folder_error(run.folder, error) from None
