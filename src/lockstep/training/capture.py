"""What is kept of a model: its weights at the end, and for `lockstep verify` the gradients of the first step."""

from __future__ import annotations

import numpy as np
from torch import nn

from lockstep.data.batches import Batches, sample_order
from lockstep.parallel.ranks import Rank
from lockstep.run import Options, Run, Spec
from lockstep.training.checkpoint import save_whole
from lockstep.training.step import Stepper


def gradients(run: Run, rank: Rank, model: nn.Module, stepper: Stepper, train: Batches, spec: Spec) -> None:
    """The exchanged gradients of the first global batch and of the last, partial one, at the initial weights."""
    plan, recipe = spec.plan, spec.recipe
    train.visit(sample_order(recipe, 1, plan.train_samples) if recipe.shuffle else None)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    last = (plan.steps_per_epoch - 1) * plan.global_batch
    for label, first, count in (
        ("first", 0, min(plan.global_batch, plan.train_samples)),
        ("last", last, plan.last_batch),
    ):
        found = stepper.gradients_only(first, count)
        if rank.is_first:
            arrays = {name: gradient.cpu().numpy() for name, gradient in zip(names, found, strict=True)}
            np.savez(run.folder / f"gradients-{label}.npz", **arrays)  # type: ignore[arg-type]


def weights(run: Run, model: nn.Module, options: Options) -> None:
    """The trained weights, whole or not at all."""
    if not options.save_model:
        return
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    save_whole(run, "model.pt", state)
