"""A loss and metrics of the user's own, tried on a few samples before training: whether the loss is a sum over samples, whole and in two
halves, and whether a metric gives one number for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.data.batches import Batches
from lockstep.errors import InputError
from lockstep.models.calling import call, cast, number_type
from lockstep.plugins import load_object, one_line
from lockstep.recipe import Recipe
from lockstep.task import is_own, measures
from lockstep.training.loss import targets_for
from lockstep.training.measures import summed

SAMPLES = 8
# A model may round otherwise in other batches, in 16 bits by half a percent; a mean is off by half.
SAME = 1e-2
_CONTRACT = "return one number for each sample, shape (N,), or their sum (reduction='sum'); Lockstep divides by the global count"


def check_loss(recipe: Recipe, model: nn.Module, batches: Batches) -> None:
    """One line with the reason if ranks, which see parts of a batch, could not add it up."""
    if not is_own(recipe):
        return
    count = min(SAMPLES, batches.count) // 2 * 2
    if count < 2:
        return
    trial = _Trial(recipe, model, batches)
    whole = trial.loss(0, count)
    if whole.shape not in ((), (count,)):
        raise InputError(f"loss={recipe.loss} returned shape {tuple(whole.shape)} for {count} samples: {_CONTRACT}")
    if not _close(trial.loss(0, count), whole):
        return  # it draws random numbers: two halves need not add up
    first, second = trial.loss(0, count // 2), trial.loss(count // 2, count)
    if whole.dim() == 0:
        if _close(first + second, whole):
            return
        if _close((first + second) / 2, whole):
            raise InputError(
                f"loss={recipe.loss} is a mean over the samples, and ranks have different numbers of them: {_CONTRACT}"
            )
        raise InputError(
            f"loss={recipe.loss} is no sum over samples: of {count} it is {float(whole):.4g}, of their halves {float(first):.4g} and "
            f"{float(second):.4g}; a rank sees only its part of a batch: {_CONTRACT}"
        )
    if not _close(torch.cat((first, second)), whole):
        raise InputError(
            f"loss={recipe.loss} of a sample depends on the other samples of its batch, and a rank sees only its part of them"
        )


def check_metrics(recipe: Recipe, model: nn.Module, batches: Batches) -> None:
    """What would be found wrong at the end of the first epoch is found before it."""
    own = {measure.name: measure.own for measure in measures(recipe) if measure.own}
    count = min(SAMPLES, batches.count)
    if not own or not count:
        return
    of, (inputs, targets) = summed(recipe), batches.take(0, count)
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            output = call(model, cast(inputs, number_type(model)))
            for name, spec in own.items():
                _tried(f"metrics={spec}", of[name], output, targets)
    finally:
        model.train(training)


def _tried(what: str, function: Callable[[Any, Tensor], Any], output: Any, targets: Tensor) -> Any:
    """What a user's function gives; what it raises is one line."""
    try:
        return function(output, targets)
    except InputError:
        raise
    except Exception as error:  # a user's code may raise anything
        code = getattr(function, "__code__", None)
        raise InputError(f"{what} raised {one_line(error, code.co_filename if code else None)}") from None


class _Trial:
    def __init__(self, recipe: Recipe, model: nn.Module, batches: Batches) -> None:
        self._recipe, self._model, self._batches = recipe, model, batches
        self._function, self._type = load_object(recipe.loss, "loss"), number_type(model)

    def loss(self, low: int, high: int) -> Tensor:
        inputs, targets = self._batches.take(low, high)
        training = self._model.training
        self._model.eval()
        try:
            with torch.no_grad():
                output = call(self._model, cast(inputs, self._type))
                targets = targets_for(output, targets)
                found: Any = _tried(f"loss={self._recipe.loss}", self._function, output, targets)
        finally:
            self._model.train(training)
        if not isinstance(found, Tensor):
            raise InputError(f"loss={self._recipe.loss} returned {type(found).__name__}, not a tensor: {_CONTRACT}")
        return found.double()


def _close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(torch.allclose(one, other, rtol=SAME, atol=1e-6))
