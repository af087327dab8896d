"""The loss that the recipe asks for, as a sum over samples, and the gradient of the weights' own penalty."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from lockstep.data.batches import Batch
from lockstep.recipe import Recipe, Regularize
from lockstep.torch_private import foreach_add_


class Loss:
    """Cross entropy, with smoothed labels or blended pairs where the recipe has them. The penalty is no part of it."""

    def __init__(self, recipe: Recipe) -> None:
        self._smoothing = recipe.regularize.label_smoothing

    def __call__(self, scores: Tensor, batch: Batch) -> Tensor:
        if batch.others is None or batch.share is None:
            return self._entropy(scores, batch.labels, "sum")
        own, other = (self._entropy(scores, labels, "none") for labels in (batch.labels, batch.others))
        # share * own + (1 - share) * other, with one product less
        return (other + batch.share * (own - other)).sum()

    def _entropy(self, scores: Tensor, labels: Tensor, reduction: str) -> Tensor:
        return functional.cross_entropy(scores, labels, reduction=reduction, label_smoothing=self._smoothing)


@torch.no_grad()
def penalize(parameters: Iterable[nn.Parameter], regularize: Regularize) -> None:
    """Add the gradient of l1 x sum |w| + l2 / 2 x sum w² to the gradients, over weights of two or more dimensions.

    Once a step, after the exchange: every rank adds the same, so it counts once whatever the number of ranks.
    """
    if not (regularize.l1 or regularize.l2):
        return
    chosen = [(p.grad, p.detach()) for p in parameters if p.grad is not None and p.dim() >= 2]
    if not chosen:
        return
    gradients, weights = [g for g, _ in chosen], [w for _, w in chosen]
    if regularize.l1:
        foreach_add_(gradients, [torch.sgn(weight) for weight in weights], alpha=regularize.l1)
    if regularize.l2:
        foreach_add_(gradients, weights, alpha=regularize.l2)
