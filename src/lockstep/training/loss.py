"""The loss that the recipe asks for, as a sum over samples, and the gradient of the weights' own penalty."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lockstep.data.batches import Batch
from lockstep.plugins import load_object
from lockstep.recipe import Recipe, Regularize
from lockstep.torch_private import foreach_add_


class Loss:
    """The recipe's loss over some samples, as a sum: of each sample's own loss, or of each token's. The penalty is no part of it.

    What the sum over a global batch is divided by is `Batches.units`: the samples, the tokens that count, or the weights of the classes.
    """

    def __init__(self, recipe: Recipe, class_weights: Sequence[float] = ()) -> None:
        self._smoothing = recipe.regularize.label_smoothing
        self._weights = torch.tensor(class_weights) if class_weights else None
        of_numbers = {"mse": _squares, "bce": _binary}.get(recipe.loss)
        self._of: Callable[[Any, Tensor, float], Tensor] = {
            "cross-entropy": self._entropy,
            "next-token": self._tokens,
        }.get(recipe.loss) or _without_smoothing(of_numbers or _own(recipe.loss))

    def __call__(self, scores: Any, batch: Batch) -> Tensor:
        """In training: with smoothed labels or blended pairs, where the recipe has them."""
        if batch.others is None or batch.share is None:
            return self._of(scores, batch.labels, self._smoothing)
        own, other = (self._entropy(scores, labels, self._smoothing, "none") for labels in (batch.labels, batch.others))
        # share * own + (1 - share) * other, with one product less
        return (other + batch.share * (own - other)).sum()

    def plain(self, scores: Any, labels: Tensor) -> Tensor:
        """In an evaluation."""
        return self._of(scores, labels, 0.0)

    def _entropy(self, scores: Tensor, labels: Tensor, smoothing: float, reduction: str = "sum") -> Tensor:
        weights = None if self._weights is None else self._weights.to(scores)
        return functional.cross_entropy(scores, labels.long(), weights, reduction=reduction, label_smoothing=smoothing)

    def _tokens(self, scores: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        return self._entropy(scores.flatten(0, -2), labels.flatten(), smoothing)


def _without_smoothing(of: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor, float], Tensor]:
    """Labels are smoothed, numbers are not (task.py)."""
    return lambda scores, targets, smoothing: of(scores, targets)


def _squares(scores: Tensor, targets: Tensor) -> Tensor:
    found = functional.mse_loss(scores.reshape(targets.shape), targets.to(scores.dtype), reduction="none")
    return mean_of_each(found).sum()


def _binary(scores: Tensor, targets: Tensor) -> Tensor:
    scores = scores.reshape(targets.shape)
    found = functional.binary_cross_entropy_with_logits(scores, targets.to(scores.dtype), reduction="none")
    return mean_of_each(found).sum()


def mean_of_each(values: Tensor) -> Tensor:
    """The mean over the numbers of each sample."""
    return values if values.dim() == 1 else values.flatten(1).mean(1)


def _own(spec: str) -> Callable[[Any, Tensor], Tensor]:
    """The user's function, called with the model's whole output and the targets: the loss of each sample, or their sum."""
    function = load_object(spec, "loss")

    def total(output: Any, targets: Tensor) -> Tensor:
        found: Tensor = function(output, targets_for(output, targets))
        return found.sum()

    return total


def targets_for(output: Any, targets: Tensor) -> Tensor:
    """As a user's function takes them: classes as int64, numbers with a point in the format of the model's answers."""
    if not targets.is_floating_point():
        return targets if targets.is_complex() else targets.long()
    return targets.to(next((one.dtype for one in tensors_in(output) if one.is_floating_point()), targets.dtype))


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Whatever a model answers: a tensor, a tuple, a mapping, a data class, and these within each other."""
    if is_dataclass(output) and not isinstance(output, Mapping):
        output = vars(output)
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping | tuple | list):
        for part in output.values() if isinstance(output, Mapping) else output:
            yield from tensors_in(part)


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
