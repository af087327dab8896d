"""What a model is judged by beside its loss: sums over samples (or tokens), and how many there were."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from lockstep.errors import InputError
from lockstep.models.output import scores_of
from lockstep.plugins import load_object
from lockstep.recipe import Recipe
from lockstep.task import IGNORED, Measure, is_own, measures
from lockstep.training.loss import mean_of_each, targets_for


class Sum(NamedTuple):
    total: Tensor
    of: int | Tensor


Of = Callable[[Any, Tensor], Sum]
TOP = 5
# Measures that count answers, right or wrong: among how many of the best classes the right one has to be.
COUNTED = {"accuracy": 1, "top5": TOP}


def summed(recipe: Recipe) -> dict[str, Of]:
    """By name, how a batch adds to each measure; perplexity follows from the loss."""
    return {measure.name: _of(recipe, measure) for measure in measures(recipe) if measure.name != "perplexity"}


def derived(recipe: Recipe, loss: float, found: dict[str, float]) -> dict[str, float]:
    """All measures, in the recipe's order."""
    return {
        measure.name: found[measure.name] if measure.name in found else math.exp(min(loss, 700.0))
        for measure in measures(recipe)
    }


def _of(recipe: Recipe, measure: Measure) -> Of:
    if measure.own:
        return _users(measure.own)
    classes = {"accuracy": _hits, "top5": _among_the_best}
    if recipe.loss == "next-token":
        found = classes[measure.name]
        return lambda scores, labels: found(scores.flatten(0, -2), labels.flatten())
    plain = _signs if recipe.loss == "bce" else classes.get(measure.name, _distance)
    if is_own(recipe):
        return lambda output, labels: plain(scores_of(output), labels)
    return plain


def _hits(scores: Tensor, labels: Tensor) -> Sum:
    return Sum((scores.argmax(1) == labels).sum(), _counted(labels))


def _among_the_best(scores: Tensor, labels: Tensor) -> Sum:
    best = scores.topk(min(TOP, scores.shape[1]), 1).indices
    return Sum((best == labels.unsqueeze(1)).sum(), _counted(labels))


def _counted(labels: Tensor) -> int | Tensor:
    """A class that is not to be counted is never predicted, so it is no hit."""
    return (labels.long() != IGNORED).sum()  # of bytes, -100 would be 156


def _signs(scores: Tensor, targets: Tensor) -> Sum:
    """The share of a sample's answers that are right."""
    right = (scores.reshape(targets.shape) > 0) == (targets > 0.5)
    return Sum(mean_of_each(right.double()).sum(), len(targets))


def _distance(scores: Tensor, targets: Tensor) -> Sum:
    return Sum(
        mean_of_each((scores.reshape(targets.shape) - targets.to(scores.dtype)).abs()).double().sum(), len(targets)
    )


def _users(spec: str) -> Of:
    function = load_object(spec, "metrics")

    def values(output: Any, targets: Tensor) -> Sum:
        found = function(output, targets_for(output, targets))
        if not isinstance(found, Tensor) or found.shape != (len(targets),):
            what = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise InputError(
                f"metrics={spec} returned {what} for {len(targets)} samples: return one number for each sample, shape (N,)"
            )
        return Sum(found.double().sum(), len(targets))

    return values
