"""Exact evaluation: every test sample once, on whatever rank; sums are put together at the end. No padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lockstep.backends.group import reduce_sum
from lockstep.data.batches import Batches
from lockstep.data.inputs import Inputs
from lockstep.models.calling import call
from lockstep.recipe import Recipe
from lockstep.training import measures
from lockstep.training.loss import Loss
from lockstep.training.precision import Precision


@dataclass(frozen=True)
class Evaluation:
    """Over all ranks."""

    loss: float
    measures: dict[str, float]
    """What the recipe's model is judged by beside its loss, by name (task.py)."""
    samples: int

    @property
    def accuracy(self) -> float:
        return self.measures["accuracy"]

    def results(self) -> dict[str, float]:
        """As an epoch's record has them."""
        return {"test_loss": self.loss, **{f"test_{name}": value for name, value in self.measures.items()}}

    def record(self) -> dict[str, Any]:
        return {**self.results(), "test_samples": self.samples}


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    batches: Batches,
    samples: int,
    mine: tuple[int, int],
    batch: int,
    precision: Precision,
    saw: Callable[[Inputs, torch.Tensor], None] | None = None,
    recipe: Recipe | None = None,
    loss_of: Loss | None = None,
) -> Evaluation:
    """Loss and measures over the first `samples` of the set, of which this rank takes the range `mine`; `saw` is told of every batch."""
    recipe = recipe or Recipe()
    loss_of, judged = loss_of or Loss(recipe), measures.summed(recipe)
    device = next(model.parameters()).device
    loss = torch.zeros((), dtype=torch.float64, device=device)
    sums = {name: torch.zeros(2, dtype=torch.float64, device=device) for name in judged}
    start, stop = mine
    model.eval()
    for low in range(start, stop, batch):
        images, labels = batches.take(low, min(low + batch, stop))
        if saw:
            saw(images, labels)
        with precision.context():
            scores = precision.scores(call(model, precision.images(images)))
        loss += loss_of.plain(scores, labels)
        for name, of in judged.items():
            total, count = of(scores, labels)
            sums[name][0] += total
            sums[name][1] += count
    model.train()
    own = [value for pair in sums.values() for value in pair.tolist()]
    total_loss, *totals, seen = reduce_sum([loss.item(), *own, float(stop - start)])
    assert seen == samples, f"evaluation saw {seen:.0f} samples of {samples}"
    mean = total_loss / (batches.units(0, samples) or 1.0)
    found = {name: totals[2 * at] / (totals[2 * at + 1] or 1.0) for at, name in enumerate(judged)}
    return Evaluation(mean, measures.derived(recipe, mean, found), samples)
