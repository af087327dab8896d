"""A recipe's update in float64: penalty, clipping and optimizer, with a bound of the error that the number format may make."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.recipe import Optimizer, Recipe
from lockstep.verify.checks import Array


@dataclass
class Rounded:
    """A number that was computed with rounding: its exact value, and a bound of the error (running error analysis)."""

    value: Array
    error: Array
    unit: float

    def _made(self, value: Array, error: Array) -> Rounded:
        return Rounded(value, error + self.unit * np.abs(value), self.unit)

    def plus(self, other: Rounded) -> Rounded:
        return self._made(self.value + other.value, self.error + other.error)

    def times(self, factor: float) -> Rounded:
        """The factor is rounded, too."""
        return self._made(self.value * factor, np.abs(factor) * self.error + self.unit * np.abs(self.value * factor))

    def by(self, other: Rounded) -> Rounded:
        error = np.abs(self.value) * other.error + np.abs(other.value) * self.error
        return self._made(self.value * other.value, error)

    def over(self, other: Rounded) -> Rounded:
        value = self.value / other.value
        return self._made(value, (self.error + np.abs(value) * other.error) / np.abs(other.value))

    def root(self) -> Rounded:
        value = np.sqrt(self.value)
        below = value - np.sqrt(np.maximum(self.value - self.error, 0.0))
        return self._made(value, np.maximum(below, np.sqrt(self.value + self.error) - value))


def exact(value: Array, unit: float) -> Rounded:
    return Rounded(value, np.zeros_like(value), unit)


def update(
    recipe: Recipe,
    settings: dict[str, Any],
    weights: dict[str, Array],
    state: dict[str, list[Any]],
    gradients: dict[str, Array | None],
    unit: float,
    signs: dict[str, Array] | None = None,
) -> dict[str, dict[str, Rounded]]:
    """What penalty, clipping and optimizer make of a gradient: weights and state of each parameter, by the recipe's formulas.

    `signs`: of the weights that are penalized; unstated, of those with two dimensions or more.
    """
    signs = {n: np.sign(w) for n, w in weights.items() if w.ndim >= 2} if signs is None else signs
    given: dict[str, Rounded] = {}
    for name, gradient in gradients.items():
        if gradient is None:
            continue
        given[name] = exact(gradient, unit)
        if name in signs:
            if settings["l1"]:
                given[name] = given[name].plus(exact(signs[name], unit).times(settings["l1"]))
            if settings["l2"]:
                given[name] = given[name].plus(exact(weights[name], unit).times(settings["l2"]))
    if settings["clip_norm"] and given:
        given = _clipped(given, settings["clip_norm"], unit)
    found: dict[str, dict[str, Rounded]] = {}
    for index, name in enumerate(gradients):
        old = {
            key: array_of(state_of(state, key, index))
            for key in _KEYS[recipe.optimizer.name]
            if has_state(state, key, index)
        }
        if name not in given:
            found[name] = {key: exact(value, unit) for key, value in {"weights": weights[name], **old}.items()}
        else:
            formula = _FORMULAS[recipe.optimizer.name]
            found[name] = formula(recipe.optimizer, settings, exact(weights[name], unit), given[name], old)
    return found


def _clipped(gradients: dict[str, Rounded], longest: float, unit: float) -> dict[str, Rounded]:
    norm = math.sqrt(sum(float(np.sum(g.value**2)) for g in gradients.values()))
    factor = min(1.0, longest / (norm + 1e-6))
    if factor == 1.0 and norm < longest * (1 - 1e-3):
        return gradients
    # A norm in float32 is a sum of squares, rounded at random.
    error = unit * (4 + math.sqrt(max(g.value.size for g in gradients.values())))
    changed = {name: g.times(factor) for name, g in gradients.items()}
    return {name: Rounded(g.value, g.error + error * np.abs(g.value), unit) for name, g in changed.items()}


def _adam(
    chosen: Optimizer, settings: dict[str, Any], weights: Rounded, gradient: Rounded, old: dict[str, Array]
) -> dict[str, Rounded]:
    beta1, beta2, lr = settings["momentum"], chosen.beta2, settings["lr"]
    if chosen.weight_decay:
        if chosen.name == "adamw":
            weights = weights.times(1 - lr * chosen.weight_decay)
        else:
            gradient = gradient.plus(weights.times(chosen.weight_decay))
    step, unit = float(old["steps"]) + 1, weights.unit
    exp_avg = exact(old["exp_avg"], unit).times(beta1).plus(gradient.times(1 - beta1))
    exp_avg_sq = exact(old["exp_avg_sq"], unit).times(beta2).plus(gradient.by(gradient).times(1 - beta2))
    roots = exp_avg_sq.root().times(1 / math.sqrt(1 - beta2**step))
    below = roots.plus(exact(np.full_like(roots.value, chosen.eps), unit))
    new = weights.plus(exp_avg.over(below).times(-lr / (1 - beta1**step)))
    return {"weights": new, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "steps": exact(np.asarray(step), unit)}


def _sgd(
    chosen: Optimizer, settings: dict[str, Any], weights: Rounded, gradient: Rounded, old: dict[str, Array]
) -> dict[str, Rounded]:
    if chosen.weight_decay:
        gradient = gradient.plus(weights.times(chosen.weight_decay))
    if not chosen.momentum:
        return {"weights": weights.plus(gradient.times(-settings["lr"]))}
    buffer = gradient
    if "momentum_buffer" in old:
        buffer = exact(old["momentum_buffer"], weights.unit).times(settings["momentum"]).plus(gradient)
    direction = gradient.plus(buffer.times(settings["momentum"])) if chosen.nesterov else buffer
    return {"weights": weights.plus(direction.times(-settings["lr"])), "momentum_buffer": buffer}


def _rmsprop(
    chosen: Optimizer, settings: dict[str, Any], weights: Rounded, gradient: Rounded, old: dict[str, Array]
) -> dict[str, Rounded]:
    unit = weights.unit
    if chosen.weight_decay:
        gradient = gradient.plus(weights.times(chosen.weight_decay))
    square_avg = exact(old["square_avg"], unit).times(chosen.alpha).plus(gradient.by(gradient).times(1 - chosen.alpha))
    direction = gradient.over(square_avg.root().plus(exact(np.full_like(square_avg.value, chosen.eps), unit)))
    found = {"square_avg": square_avg}
    if "momentum_buffer" in old:
        direction = exact(old["momentum_buffer"], unit).times(settings["momentum"]).plus(direction)
        found["momentum_buffer"] = direction
    return {"weights": weights.plus(direction.times(-settings["lr"])), **found}


_FORMULAS = {"adam": _adam, "adamw": _adam, "sgd": _sgd, "rmsprop": _rmsprop}
_KEYS = {
    "adam": ("exp_avg", "exp_avg_sq", "steps"),
    "adamw": ("exp_avg", "exp_avg_sq", "steps"),
    "sgd": ("momentum_buffer",),
    "rmsprop": ("square_avg", "momentum_buffer"),
}


def _place(state: dict[str, list[Any]], index: int) -> int | None:
    """Where a parameter's state is in the lists; some optimizers list which parameters they have any for."""
    if "which" not in state:
        return index
    listed = [int(number) for number in state["which"]]
    return listed.index(index) if index in listed else None


def has_state(state: dict[str, list[Any]], key: str, index: int) -> bool:
    return bool(state.get(key)) and _place(state, index) is not None


def state_of(state: dict[str, list[Any]], key: str, index: int) -> Any:
    place = _place(state, index)
    return state[key][place] if place is not None else np.asarray(math.nan)


def array_of(tensor: Any) -> Array:
    """In float64; complex numbers as pairs of real ones, which is what an optimizer takes them for."""
    if isinstance(tensor, np.ndarray):
        return tensor
    if tensor.is_complex():
        return tensor.resolve_conj().numpy().astype(np.complex128)[..., None].view(np.float64)  # type: ignore[no-any-return]
    found: Array = tensor.double().numpy()
    return found


def kind_of(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")
