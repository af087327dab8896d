"""Exact evaluation: every test sample once, on whatever rank; sums are put together at the end. No padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from lockstep.backends.group import reduce_sum
from lockstep.data.batches import Batches
from lockstep.training.precision import Precision


@dataclass(frozen=True)
class Evaluation:
    """Over all ranks."""

    loss: float
    accuracy: float
    samples: int

    def record(self) -> dict[str, Any]:
        """As an epoch's record has it."""
        return {"test_loss": self.loss, "test_accuracy": self.accuracy, "test_samples": self.samples}


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    batches: Batches,
    samples: int,
    mine: tuple[int, int],
    batch: int,
    precision: Precision,
    saw: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
) -> Evaluation:
    """Loss and accuracy over the first `samples` of the set, of which this rank takes the range `mine`; `saw` is told of every batch."""
    device = next(model.parameters()).device
    loss = torch.zeros((), dtype=torch.float64, device=device)
    correct = torch.zeros((), dtype=torch.int64, device=device)
    start, stop = mine
    model.eval()
    for low in range(start, stop, batch):
        images, labels = batches.take(low, min(low + batch, stop))
        if saw:
            saw(images, labels)
        with precision.context():
            scores = precision.scores(model(precision.images(images)))
        loss += functional.cross_entropy(scores, labels, reduction="sum")
        correct += (scores.argmax(1) == labels).sum()
    model.train()
    total_loss, total_correct, total = reduce_sum([loss.item(), float(correct.item()), float(stop - start)])
    assert total == samples, f"evaluation saw {total:.0f} samples of {samples}"
    return Evaluation(total_loss / samples, total_correct / samples, samples)
