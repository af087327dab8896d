"""Judging steps. Three links make one, and each is judged by itself, so that no error can hide behind the rounding of another:

- **exchange**: the gradient that the optimizer was given is the sum of the ranks' own gradients. A bound on every entry.
- **gradient**: it is the gradient of the global batch, in float64. A norm for each tensor, against that tensor's own rounding.
- **update**: weights and optimizer state after the step are what the optimizer's formula in float64 makes of that very gradient.
  A bound on every entry, by running error analysis.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lockstep.verify.checks import Array, Check, Worst, compare_entries, relative
from lockstep.verify.records import Records, step_losses
from lockstep.verify.update import array_of, kind_of, state_of, update

UNIT_ROUNDING = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
UNIT_ROUNDING |= {"complex128": UNIT_ROUNDING["float64"], "complex64": UNIT_ROUNDING["float32"]}
PASS_ROUNDING = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11, "pure-bf16": 2.0**-8, "pure-fp16": 2.0**-11}
# Orders of operations that the bounds do not follow (fused multiply-add, lerp, vector and scalar code).
SLACK = 4.0
# How many times the one process's own error another division of the same sum may be off.
MARGIN = 6.0
# Below this, numbers lose digits one by one, and no relative bound holds.
TINY = {"float64": 1e-300, "float32": 1e-37, "bfloat16": 1e-37, "float16": 1e-4 * 2.0**-10}
TINY |= {"complex128": TINY["float64"], "complex64": TINY["float32"]}
# Sums of up to a million terms, rounded at random: the square root of their number.
TERMS = 1024.0
# Steps in which fp16 may overflow, while its loss scale is being found.
OVERFLOWS = 8


@dataclass
class Rounding:
    """How far the one process in its own number format was from float64, over all judged steps: relative, by tensor."""

    gradient: dict[str, float] = field(default_factory=dict)
    loss: float = 0.0


class Steps:
    """The judged steps of one run."""

    def __init__(self, reference: Records, other: Records, against: str, rounding: Rounding) -> None:
        self._reference, self._other, self._against, self._rounding = reference, other, against, rounding
        self._recipe = other.spec.recipe
        self._exchange, self._gradient, self._weights = Worst(), Worst(), Worst()
        self._state, self._loss, self._buffers = Worst(), Worst(), Worst()
        self._absent, self._overflows, self._diverged = Worst(), 0, ""

    def checks(self) -> Iterator[Check]:
        losses = step_losses(self._other.run)
        judged = [step for step in self._reference.judged if (self._reference.folder / f"true-{step:08d}.pt").exists()]
        for step in judged:
            self._step(step, float(losses[step]) if step < len(losses) else math.nan)
            if self._diverged:
                break
        if not (self._diverged or self._gradient.count):
            self._diverged = "no step was judged"
        if self._overflows > OVERFLOWS:
            self._diverged = f"fp16 overflowed in {self._overflows} of {len(judged)} steps"
        exchange = "exchanged gradient against the sum of the ranks' own"
        found = [
            (exchange, self._exchange, self._other.spec.plan.ranks > 1 and self._exchange.count > 0),
            ("parameters with and without a gradient", self._absent, self._other is not self._reference),
            ("gradient against float64", self._gradient, True),
            ("weights after the update", self._weights, True),
            ("optimizer state after the update", self._state, self._state.count > 0),
            ("buffers after the step", self._buffers, self._buffers.count > 0),
            ("loss of every step", self._loss, True),
        ]
        for what, worst, asked in found:
            if asked and self._diverged:
                yield Check(what, self._against, math.nan, worst.allowed, diverged=self._diverged)
            elif asked:
                yield worst.check(what, self._against)

    def _step(self, step: int, loss: float) -> None:
        before, truth = self._reference.load("state", step), self._reference.load("true", step)
        ours, found = self._reference.load("step", step), self._other.load("step", step)
        assert before is not None
        assert truth is not None
        assert ours is not None
        at = f"step {step + 1}"
        if found is None:
            self._gradient.add(math.nan, 0.0, f"{at} was not taken")
            return
        row, true_row = self._other.rows[0][step], self._reference.rows[0][step]
        scaled = row["scale"] if self._recipe.precision == "fp16" else 1.0
        gradients = {n: None if g is None else array_of(g) / scaled for n, g in found["gradient"].items()}
        reference = {n: None if g is None else array_of(g) / scaled for n, g in ours["gradient"].items()}
        if self._recipe.precision == "fp16" and not (_finite(gradients) and _finite(reference)):
            if _finite(reference) and self._own_are_finite(step):
                self._gradient.add(math.nan, 0.0, f"{at}: not finite, though no rank's own gradient overflowed")
            self._overflows += 1
            return
        if not (_finite(reference) and math.isfinite(truth["loss"])):
            self._diverged = f"training diverged: in one process, too, the gradient of {at} is not finite"
            return
        absent = {name for name in gradients if (gradients[name] is None) != (reference[name] is None)}
        self._absent.add(len(absent), 0, f"{at}, {min(absent)}" if absent else "")
        self._compare_gradients(gradients, truth, at)
        self._compare_exchange(step, gradients, found, at)
        self._compare_update(before, found, gradients, true_row, at)
        self._compare_buffers(step, before, found, at)
        moved = max(self._rounding.loss, truth["loss_moved"] / abs(truth["loss"] or 1.0))
        allowed = MARGIN * moved + TERMS / 64 * PASS_ROUNDING[self._recipe.precision]
        self._loss.add(abs(loss - truth["loss"]) / abs(truth["loss"] or 1.0), allowed, at)

    def _compare_gradients(self, gradients: dict[str, Array | None], truth: dict[str, Any], at: str) -> None:
        true = {name: array_of(gradient) for name, gradient in truth["gradient"].items()}
        typical = _rms(true)
        for name, gradient in gradients.items():
            length = _norm(true[name])
            # What a tensor of this size would be, were all entries as large as the whole gradient's are in the mean: a tensor that
            # is nothing beside it (a bias before batch norm has a gradient of 0) is rounding alone.
            floor = 4 * PASS_ROUNDING[self._recipe.precision] * typical * math.sqrt(true[name].size)
            own = self._rounding.gradient.get(name, 0.0) * length
            allowed = MARGIN * max(own, float(truth["moved"][name]), floor)
            difference = _norm((0.0 if gradient is None else gradient) - true[name])
            self._gradient.add(*relative(difference, allowed, length), f"{at}, {name}")

    def _own_are_finite(self, step: int) -> bool:
        """Whether every rank's own gradient of this step is known and finite."""
        own = [self._other.load("own", step, rank) for rank in range(self._other.spec.plan.ranks)]
        return all(each is not None and _finite({n: array_of(g) for n, g in each["gradient"].items()}) for each in own)

    def _compare_exchange(self, step: int, gradients: dict[str, Array | None], found: dict[str, Any], at: str) -> None:
        ranks = range(self._other.spec.plan.ranks)
        own = [self._other.load("own", step, rank) for rank in ranks]
        if any(each is None for each in own):
            return
        passes = max(each["passes"] for each in own if each)
        for name, gradient in gradients.items():
            if gradient is None:
                continue
            kind = kind_of(found["gradient"][name])
            total = np.sum([array_of(each["gradient"][name]) for each in own if each], axis=0)
            size = np.sum([array_of(each["size"][name]) for each in own if each], axis=0)
            # One rounding for each pass and each rank that is added, and two for the mean's factor.
            bound = SLACK * (passes + len(ranks) + 2) * UNIT_ROUNDING[kind] * size + TINY[kind]
            compare_entries(self._exchange, gradient - total, bound, _norm(total), f"{at}, {name}")

    def _compare_update(
        self,
        before: dict[str, Any],
        found: dict[str, Any],
        gradients: dict[str, Array | None],
        settings: dict[str, Any],
        at: str,
    ) -> None:
        unit = max(UNIT_ROUNDING[kind_of(before["model"][name])] for name in gradients)
        weights = {name: array_of(before["model"][name]) for name in gradients}
        signs = {name: array_of(t.sgn()) for name in gradients if (t := before["model"][name]).dim() >= 2}
        expected = update(self._recipe, settings, weights, before["optimizer"], gradients, unit, signs)
        for index, name in enumerate(gradients):
            for key, value in expected[name].items():
                if key == "weights":
                    actual, worst = array_of(found["model"][name]), self._weights
                else:
                    actual, worst = array_of(state_of(found["optimizer"], key, index)), self._state
                bound = SLACK * value.error + TINY[kind_of(before["model"][name])]
                moved = _norm(value.value - weights[name]) if key == "weights" else _norm(value.value)
                compare_entries(worst, actual - value.value, bound, moved, f"{at}, {name}")

    def _compare_buffers(self, step: int, before: dict[str, Any], found: dict[str, Any], at: str) -> None:
        """What the placement had before it loaded this step's state, so what the step before made."""
        if step - 1 not in self._other.rows[0] or not (self._other.folder / f"step-{step - 1:08d}.pt").exists():
            return
        allowed = max(TERMS * 2.0**-24, 2 * PASS_ROUNDING[self._recipe.precision])
        for name, buffer in found.get("buffers", {}).items():
            if name not in before["model"]:
                continue
            ours, theirs = array_of(before["model"][name]), array_of(buffer)
            same = np.isnan(ours) & np.isnan(theirs)  # a range that nothing has been seen of yet
            ours, theirs = np.where(same, 0.0, ours), np.where(same, 0.0, theirs)
            exact = not before["model"][name].dtype.is_floating_point
            length = max(_norm(ours), TINY["float32"])
            self._buffers.add(_norm(ours - theirs) / length, 0.0 if exact else allowed, f"before {at}, {name}")


def own_rounding(reference: Records) -> Rounding:
    """The one process against float64, the largest over all judged steps."""
    found, losses = Rounding(), step_losses(reference.run)
    for step in reference.judged:
        truth, ours = reference.load("true", step), reference.load("step", step)
        if truth is None or ours is None:
            continue
        scale = reference.rows[0][step]["scale"]
        for name, gradient in ours["gradient"].items():
            true = array_of(truth["gradient"][name])
            error = _norm((0.0 if gradient is None else array_of(gradient) / scale) - true)
            if math.isfinite(error) and _norm(true) > 0:
                # What a kink has added at this step says nothing about other steps.
                error = max(0.0, error - float(truth["moved"][name]))
                found.gradient[name] = max(found.gradient.get(name, 0.0), error / _norm(true))
        if math.isfinite(truth["loss"]) and truth["loss"]:
            found.loss = max(found.loss, abs(float(losses[step]) - truth["loss"]) / abs(truth["loss"]))
    return found


def _norm(array: Array) -> float:
    return float(np.linalg.norm(np.ravel(array)))


def _rms(arrays: dict[str, Array]) -> float:
    count = sum(array.size for array in arrays.values())
    return math.sqrt(sum(float(np.sum(array**2)) for array in arrays.values()) / max(1, count))


def _finite(arrays: dict[str, Array | None]) -> bool:
    return all(array is None or bool(np.isfinite(array).all()) for array in arrays.values())
