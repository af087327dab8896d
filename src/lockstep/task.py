"""The task of a recipe: which loss is minimised, and what a model is judged by beside it.

Whoever trains, tests, shows or compares a run asks here, so that nobody else has to know what a regression has instead of an accuracy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import NamedTuple

from lockstep.errors import InputError
from lockstep.plugins import is_spec
from lockstep.recipe import Recipe

# Labels with this value are not counted, as in PyTorch: padding of token sequences.
IGNORED = -100
# By loss: what a model is judged by, where the recipe does not say.
LOSSES: dict[str, tuple[str, ...]] = {
    "cross-entropy": ("accuracy",),
    "mse": ("mae",),
    "bce": ("accuracy",),
    "next-token": ("perplexity", "accuracy"),
}
_CLASSES = ("cross-entropy", "next-token")
# By measure: the losses that it goes with. A loss of the user's own goes with all that need nothing but scores.
MEASURES: dict[str, tuple[str, ...]] = {
    "accuracy": ("cross-entropy", "bce", "next-token"),
    "top5": _CLASSES,
    "mae": ("mse",),
    "perplexity": _CLASSES,
}
_OF_THE_LOSS = "perplexity"
# What a record of an epoch has beside them (test_loss, test_samples).
_TAKEN = ("loss", "samples")


class Measure(NamedTuple):
    """What a model is judged by, over the whole test set: `test_NAME` in records."""

    name: str
    own: str = ""
    """The user's function, as path/to/file.py:function; empty for ours."""


def is_own(recipe: Recipe) -> bool:
    """Whether the loss is the user's function, which gets the model's whole output."""
    return is_spec(recipe.loss)


def own_functions(recipe: Recipe) -> list[str]:
    """The user's own loss and metrics: files that may change under the same name."""
    return [name for name in (recipe.loss, *(measure.own for measure in measures(recipe))) if is_spec(name)]


def measures(recipe: Recipe) -> list[Measure]:
    """What the recipe's model is judged by, the most important one first; none for a loss of the user's own, unless stated."""
    if recipe.metrics == "auto":
        return [Measure(name) for name in LOSSES.get(recipe.loss, ())]
    found = [part.strip() for part in recipe.metrics.split(",")]
    return [Measure(name_of(part), part) if is_spec(part) else Measure(part) for part in found]


def name_of(measure: str) -> str:
    """What a measure is called in records, also one of the user's own: that of path/to/file.py:f1 is f1."""
    return measure.rpartition(":")[2].rpartition(".")[2]


def main_measure(recipe: Recipe) -> str:
    """What a model is judged by in the first place: a measure, or the loss where there is none."""
    return next((measure.name for measure in measures(recipe)), "loss")


def check(recipe: Recipe) -> None:
    """Refuse a loss or a measure that does not exist, and settings that mean nothing for the loss."""
    if recipe.loss not in LOSSES and not is_own(recipe):
        raise InputError(f"loss={recipe.loss}: no such loss; {_hint(recipe.loss, LOSSES)}")
    found = measures(recipe)
    for measure in found:
        _check_measure(recipe, measure)
    if len({measure.name for measure in found}) < len(found):
        raise InputError(f"metrics={recipe.metrics}: two of them have the same name")
    regularize, stopping = recipe.regularize, recipe.early_stopping
    if regularize.label_smoothing and recipe.loss not in _CLASSES:
        raise InputError(f"regularize.label_smoothing is for classes, not for loss={recipe.loss}: leave it out")
    if regularize.mixup and recipe.loss != "cross-entropy":
        raise InputError(f"regularize.mixup blends images and their classes, not loss={recipe.loss}: leave it out")
    if stopping.on == "test_accuracy" and "accuracy" not in [each.name for each in found]:
        raise InputError(
            f"early_stopping.on=test_accuracy: loss={recipe.loss} has no accuracy: choose early_stopping.on=test_loss"
        )
    if recipe.quantize != "off" and recipe.loss != "cross-entropy":
        raise InputError(
            f"quantize={recipe.quantize} is for image classifiers, not for loss={recipe.loss}: leave it out"
        )


def _check_measure(recipe: Recipe, measure: Measure) -> None:
    if measure.own:
        if measure.name in (*_TAKEN, *MEASURES):
            raise InputError(
                f"metrics={measure.own}: records have a test_{measure.name} already: give the function another name"
            )
        return
    if measure.name not in MEASURES:
        raise InputError(f"metrics={measure.name}: no such metric; {_hint(measure.name, MEASURES)}")
    fits = measure.name != _OF_THE_LOSS if is_own(recipe) else recipe.loss in MEASURES[measure.name]
    if not fits:
        usual = ", ".join(LOSSES.get(recipe.loss, ())) or "your own"
        raise InputError(f"metrics={measure.name} does not go with loss={recipe.loss}: choose {usual}")


def _hint(name: str, known: Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(name.lower().replace("_", "-"), names, n=1)
    return (
        f"did you mean '{near[0]}'?" if near else f"known: {', '.join(names)}, or your own as path/to/file.py:function"
    )
