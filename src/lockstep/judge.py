"""Judging what the witnesses of two runs wrote down: is it the same computation, up to rounding? (docs/verify.md derives the tolerances.)

Three links make a step, and each is judged by itself, so that no error can hide behind the rounding of another:

- **exchange**: the gradient that the optimizer was given is the sum of the ranks' own gradients. A bound on every entry.
- **gradient**: it is the gradient of the global batch, in float64. A norm for each tensor, against that tensor's own rounding.
- **update**: weights and optimizer state after the step are what the optimizer's formula in float64 makes of that very gradient.
  A bound on every entry, by running error analysis.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.measure.records import read_steps
from lockstep.recipe import Optimizer, Recipe
from lockstep.run import Run, read_lines

Array = np.ndarray[Any, np.dtype[np.float64]]
UNIT_ROUNDING = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
PASS_ROUNDING = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11, "pure-bf16": 2.0**-8, "pure-fp16": 2.0**-11}
# Orders of operations that the bounds do not follow (fused multiply-add, lerp, vector and scalar code).
SLACK = 4.0
# How many times the one process's own error another division of the same sum may be off.
MARGIN = 6.0
# Below this, numbers lose digits one by one, and no relative bound holds.
TINY = {"float64": 1e-300, "float32": 1e-37, "bfloat16": 1e-37, "float16": 1e-4 * 2.0**-10}
# Sums of up to a million terms, rounded at random: the square root of their number.
TERMS = 1024.0
# Files of the one process are read once for each placement; small ones stay in memory.
SMALL_BYTES = 1 << 20
# Steps in which fp16 may overflow, while its loss scale is being found.
OVERFLOWS = 8


@dataclass(frozen=True)
class Check:
    """One comparison: what, how far apart, how far apart is still rounding, and where it was worst."""

    what: str
    against: str
    difference: float
    allowed: float
    where: str = ""
    diverged: str = ""
    """Why nothing can be said: the training itself gives no numbers."""

    @property
    def passed(self) -> bool:
        return not self.diverged and bool(self.difference <= self.allowed)  # NaN does not pass

    @property
    def verdict(self) -> str:
        return "ok" if self.passed else "not proven" if self.diverged else "DIFFERENT"


@dataclass
class Worst:
    """The first comparison that went beyond what is allowed, else the one that came closest. NaN is beyond everything."""

    difference: float = 0.0
    allowed: float = 0.0
    where: str = ""
    count: int = 0

    def add(self, difference: float, allowed: float, where: str) -> None:
        self.count += 1
        if _ratio(self.difference, self.allowed) > 1:
            return
        if self.count == 1 or _ratio(difference, allowed) > _ratio(self.difference, self.allowed):
            self.difference, self.allowed, self.where = difference, allowed, where

    def check(self, what: str, against: str) -> Check:
        return Check(what, against, self.difference, self.allowed, self.where)


def _ratio(difference: float, allowed: float) -> float:
    if math.isnan(difference) or math.isnan(allowed) or math.isinf(difference):
        return math.inf
    return difference / allowed if allowed > 0 else (math.inf if difference > 0 else 0.0)


class Records:
    """What the witnesses of one run wrote down."""

    def __init__(self, run: Run) -> None:
        self.run, self.spec = run, run.spec()
        self.folder = run.folder / "proof"
        self.rows: list[dict[int, dict[str, Any]]] = []
        self.evaluations: list[dict[int, dict[str, Any]]] = []
        self.has_batch_norm = False
        self._small: dict[Path, dict[str, Any]] = {}
        for rank in range(self.spec.plan.ranks):
            lines = list(read_lines(self.folder / f"rank-{rank:04d}.jsonl"))
            self.rows.append({row["step"]: row for row in lines if "step" in row})
            self.evaluations.append({row["epoch"]: _numbers(row) for row in lines if "epoch" in row})
            self.has_batch_norm |= any(row.get("batch_norm", False) for row in lines)

    def load(self, kind: str, number: int, rank: int | None = None) -> dict[str, Any] | None:
        import torch

        path = self.folder / f"{kind}-{number:08d}{'' if rank is None else f'-{rank:04d}'}.pt"
        if path in self._small:
            return self._small[path]
        content: dict[str, Any] | None = (
            torch.load(path, map_location="cpu", weights_only=True) if path.exists() else None
        )
        if content is not None and path.stat().st_size < SMALL_BYTES:
            self._small[path] = content
        return content

    @property
    def judged(self) -> list[int]:
        return sorted(int(path.stem.partition("-")[2]) for path in self.folder.glob("step-*.pt"))


def _numbers(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: it was written as null."""
    return {key: math.nan if value is None else value for key, value in row.items()}


@dataclass
class Rounding:
    """How far the one process in its own number format was from float64, over all judged steps: relative, by tensor."""

    gradient: dict[str, float] = field(default_factory=dict)
    loss: float = 0.0


def judge(reference: Records, other: Records, name: str, rounding: Rounding | None = None) -> Iterator[Check]:
    """All checks of a placement against the one process (or of the one process against float64)."""
    against = f"{name} against 1 process" if other is not reference else f"{name} against float64"
    rounding = rounding or own_rounding(reference)
    steps = _Steps(reference, other, against, rounding)
    if other is not reference:
        yield _samples(reference, other, against)
        yield _settings(reference, other, against)
        yield _ranks_agree(other, name)
        yield _undisturbed(other, name)
    yield from steps.checks()
    yield from _evaluations(reference, other, against, rounding)


def _samples(reference: Records, other: Records, against: str) -> Check:
    wrong, where = 0, ""
    for step, row in reference.rows[0].items():
        difference = _unlike(row["samples"], [s for rows in other.rows for s in rows.get(step, {}).get("samples", [])])
        if difference and not where:
            where = f"step {step + 1}"
        wrong += difference
    wrong += sum(len(rows.keys() ^ reference.rows[0].keys()) for rows in other.rows)
    return Check("samples of every step", against, wrong, 0, where)


def _unlike(ours: list[str], theirs: list[str]) -> int:
    """How many samples one has and the other has not, twice counted twice."""
    one, two = Counter(ours), Counter(theirs)
    return max((one - two).total(), (two - one).total())


def _settings(reference: Records, other: Records, against: str) -> Check:
    worst = Worst()
    for step, row in reference.rows[0].items():
        for rows in other.rows:
            for key in ("lr", "inertia", "clip_norm", "l1", "l2"):
                ours, theirs = float(row[key] or 0), float(rows.get(step, {}).get(key) or 0)
                worst.add(
                    abs(ours - theirs) / (abs(ours) or 1.0), 0.0, f"step {step + 1}, {key} {theirs:g}, not {ours:g}"
                )
    found = worst.check("learning rate, clipping, penalty of every step", against)
    return found if not found.passed else Check(found.what, against, 0, 0)


def _ranks_agree(other: Records, name: str) -> Check:
    different, where = 0, ""
    for step, row in other.rows[0].items():
        for rows in other.rows[1:]:
            if any(rows.get(step, {}).get(key) != row.get(key) for key in ("gradient", "weights", "optimizer")):
                where = where or f"step {step + 1}"
                different += 1
                break
    return Check("steps after which ranks differ by a bit", name, different, 0, where)


def _undisturbed(other: Records, name: str) -> Check:
    broken = [step for rows in other.rows for step, row in rows.items() if not row["undisturbed"]]
    where = f"before step {min(broken) + 1}" if broken else ""
    return Check("weights that change between steps", name, len(broken), 0, where)


def same_bits(one: Records, two: Records, name: str) -> Check:
    """Two runs of one placement."""
    different = 0
    for ours, theirs in zip(one.rows, two.rows, strict=True):
        keys = ("gradient", "weights", "samples")
        different += sum(any(row[k] != theirs.get(step, {}).get(k) for k in keys) for step, row in ours.items())
        different += len(theirs.keys() - ours.keys())
    return Check("steps that differ by a bit", f"{name}, twice", different, 0)


class _Steps:
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
        gradients = {n: None if g is None else _array(g) / scaled for n, g in found["gradient"].items()}
        reference = {n: None if g is None else _array(g) / scaled for n, g in ours["gradient"].items()}
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
        true = {name: _array(gradient) for name, gradient in truth["gradient"].items()}
        typical = _rms(true)
        for name, gradient in gradients.items():
            length = _norm(true[name])
            # What a tensor of this size would be, were all entries as large as the whole gradient's are in the mean: a tensor that
            # is nothing beside it (a bias before batch norm has a gradient of 0) is rounding alone.
            floor = 4 * PASS_ROUNDING[self._recipe.precision] * typical * math.sqrt(true[name].size)
            own = self._rounding.gradient.get(name, 0.0) * length
            allowed = MARGIN * max(own, float(truth["moved"][name]), floor)
            difference = _norm((0.0 if gradient is None else gradient) - true[name])
            self._gradient.add(*_relative(difference, allowed, length), f"{at}, {name}")

    def _own_are_finite(self, step: int) -> bool:
        """Whether every rank's own gradient of this step is known and finite."""
        own = [self._other.load("own", step, rank) for rank in range(self._other.spec.plan.ranks)]
        return all(each is not None and _finite({n: _array(g) for n, g in each["gradient"].items()}) for each in own)

    def _compare_exchange(self, step: int, gradients: dict[str, Array | None], found: dict[str, Any], at: str) -> None:
        ranks = range(self._other.spec.plan.ranks)
        own = [self._other.load("own", step, rank) for rank in ranks]
        if any(each is None for each in own):
            return
        passes = max(each["passes"] for each in own if each)
        for name, gradient in gradients.items():
            if gradient is None:
                continue
            kind = _kind(found["gradient"][name])
            total = np.sum([_array(each["gradient"][name]) for each in own if each], axis=0)
            size = np.sum([_array(each["size"][name]) for each in own if each], axis=0)
            # One rounding for each pass and each rank that is added, and two for the mean's factor.
            bound = SLACK * (passes + len(ranks) + 2) * UNIT_ROUNDING[kind] * size + TINY[kind]
            _entries(self._exchange, gradient - total, bound, _norm(total), f"{at}, {name}")

    def _compare_update(
        self,
        before: dict[str, Any],
        found: dict[str, Any],
        gradients: dict[str, Array | None],
        settings: dict[str, Any],
        at: str,
    ) -> None:
        unit = max(UNIT_ROUNDING[_kind(before["model"][name])] for name in gradients)
        weights = {name: _array(before["model"][name]) for name in gradients}
        expected = update(self._recipe, settings, weights, before["optimizer"], gradients, unit)
        for index, name in enumerate(gradients):
            for key, value in expected[name].items():
                if key == "weights":
                    actual, worst = _array(found["model"][name]), self._weights
                else:
                    actual, worst = _array(_of(found["optimizer"], key, index)), self._state
                bound = SLACK * value.error + TINY[_kind(before["model"][name])]
                moved = _norm(value.value - weights[name]) if key == "weights" else _norm(value.value)
                _entries(worst, actual - value.value, bound, moved, f"{at}, {name}")

    def _compare_buffers(self, step: int, before: dict[str, Any], found: dict[str, Any], at: str) -> None:
        """What the placement had before it loaded this step's state, so what the step before made."""
        if step - 1 not in self._other.rows[0] or not (self._other.folder / f"step-{step - 1:08d}.pt").exists():
            return
        allowed = max(TERMS * 2.0**-24, 2 * PASS_ROUNDING[self._recipe.precision])
        for name, buffer in found.get("buffers", {}).items():
            if name not in before["model"]:
                continue
            ours, theirs = _array(before["model"][name]), _array(buffer)
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
            true = _array(truth["gradient"][name])
            error = _norm((0.0 if gradient is None else _array(gradient) / scale) - true)
            if math.isfinite(error) and _norm(true) > 0:
                # What a kink has added at this step says nothing about other steps.
                error = max(0.0, error - float(truth["moved"][name]))
                found.gradient[name] = max(found.gradient.get(name, 0.0), error / _norm(true))
        if math.isfinite(truth["loss"]) and truth["loss"]:
            found.loss = max(found.loss, abs(float(losses[step]) - truth["loss"]) / abs(truth["loss"]))
    return found


def _evaluations(reference: Records, other: Records, against: str, rounding: Rounding) -> Iterator[Check]:
    wrong, hits, loss, where = 0, Worst(), Worst(), ""
    for epoch, row in reference.evaluations[0].items():
        rows = [found.get(epoch, {}) for found in other.evaluations]
        if other is not reference:
            unlike = _unlike(row["samples"], [sample for each in rows for sample in each.get("samples", [])])
            unlike += sum(each.get("count") != row["count"] for each in rows)
            where = where or (f"epoch {epoch}" if unlike else "")
            wrong += unlike
        truth = reference.load("evaluation", epoch)
        assert truth is not None
        own = abs(row["loss"] - truth["true_loss"]) / abs(truth["true_loss"] or 1.0)
        allowed = MARGIN * max(own, rounding.loss) + TERMS / 64 * PASS_ROUNDING[other.spec.recipe.precision]
        for each in rows:
            difference = abs(each.get("loss", math.nan) - truth["true_loss"]) / abs(truth["true_loss"] or 1.0)
            loss.add(difference, allowed, f"epoch {epoch}")
            counted = round(each.get("accuracy", math.nan) * row["count"]) if "accuracy" in each else math.nan
            hits.add(abs(counted - truth["true_hits"]), truth["unsure"], f"epoch {epoch}")
    if other is not reference:
        yield Check("samples of every evaluation", against, wrong, 0, where)
    if any(not math.isfinite(row["loss"]) for row in reference.evaluations[0].values()):
        why = "training diverged: in one process, too, the test loss is not finite"
        yield Check("test loss", against, math.nan, 0, diverged=why)
        return
    yield hits.check("test samples that are right", against)
    yield loss.check("test loss", against)


def step_losses(run: Run) -> Array:
    """The mean loss of a sample at every step, over all ranks."""
    rows = [read_steps(run.rank_folder(rank) / "steps.bin") for rank in range(run.spec().plan.ranks)]
    loss = np.sum([r["loss_sum"] for r in rows], axis=0)
    samples = np.sum([r["samples"] for r in rows], axis=0)
    mean: Array = loss / samples
    return mean


# The update in float64, with the error that the number format may make


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


def update(
    recipe: Recipe,
    settings: dict[str, Any],
    weights: dict[str, Array],
    state: dict[str, list[Any]],
    gradients: dict[str, Array | None],
    unit: float,
) -> dict[str, dict[str, Rounded]]:
    """What penalty, clipping and optimizer make of a gradient: weights and state of each parameter, by the recipe's formulas."""

    def exact(value: Array) -> Rounded:
        return Rounded(value, np.zeros_like(value), unit)

    given: dict[str, Rounded] = {}
    for name, gradient in gradients.items():
        if gradient is None:
            continue
        given[name] = exact(gradient)
        if weights[name].ndim >= 2:
            if settings["l1"]:
                given[name] = given[name].plus(exact(np.sign(weights[name])).times(settings["l1"]))
            if settings["l2"]:
                given[name] = given[name].plus(exact(weights[name]).times(settings["l2"]))
    if settings["clip_norm"] and given:
        given = _clipped(given, settings["clip_norm"], unit)
    found: dict[str, dict[str, Rounded]] = {}
    for index, name in enumerate(gradients):
        old = {key: _array(_of(state, key, index)) for key in _KEYS[recipe.optimizer.name] if _has(state, key, index)}
        if name not in given:
            found[name] = {"weights": exact(weights[name])} | {key: exact(value) for key, value in old.items()}
        else:
            formula = _FORMULAS[recipe.optimizer.name]
            found[name] = formula(recipe.optimizer, settings, exact(weights[name]), given[name], old)
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
    beta1, beta2, lr = settings["inertia"], chosen.beta2, settings["lr"]
    if chosen.weight_decay:
        if chosen.name == "adamw":
            weights = weights.times(1 - lr * chosen.weight_decay)
        else:
            gradient = gradient.plus(weights.times(chosen.weight_decay))

    def exact(value: Array) -> Rounded:
        return Rounded(value, np.zeros_like(value), weights.unit)

    step = float(old["steps"]) + 1
    means = exact(old["means"]).times(beta1).plus(gradient.times(1 - beta1))
    squares = exact(old["squares"]).times(beta2).plus(gradient.by(gradient).times(1 - beta2))
    roots = squares.root().times(1 / math.sqrt(1 - beta2**step))
    below = roots.plus(exact(np.full_like(roots.value, chosen.eps)))
    new = weights.plus(means.over(below).times(-lr / (1 - beta1**step)))
    return {"weights": new, "means": means, "squares": squares, "steps": exact(np.asarray(step))}


def _sgd(
    chosen: Optimizer, settings: dict[str, Any], weights: Rounded, gradient: Rounded, old: dict[str, Array]
) -> dict[str, Rounded]:
    if chosen.weight_decay:
        gradient = gradient.plus(weights.times(chosen.weight_decay))
    if not chosen.momentum:
        return {"weights": weights.plus(gradient.times(-settings["lr"]))}
    speed = gradient
    if "speeds" in old:
        speed = (
            Rounded(old["speeds"], np.zeros_like(old["speeds"]), weights.unit).times(settings["inertia"]).plus(gradient)
        )
    direction = gradient.plus(speed.times(settings["inertia"])) if chosen.nesterov else speed
    return {"weights": weights.plus(direction.times(-settings["lr"])), "speeds": speed}


def _rmsprop(
    chosen: Optimizer, settings: dict[str, Any], weights: Rounded, gradient: Rounded, old: dict[str, Array]
) -> dict[str, Rounded]:
    def exact(value: Array) -> Rounded:
        return Rounded(value, np.zeros_like(value), weights.unit)

    if chosen.weight_decay:
        gradient = gradient.plus(weights.times(chosen.weight_decay))
    squares = exact(old["squares"]).times(chosen.alpha).plus(gradient.by(gradient).times(1 - chosen.alpha))
    direction = gradient.over(squares.root().plus(exact(np.full_like(squares.value, chosen.eps))))
    found = {"squares": squares}
    if "speeds" in old:
        direction = exact(old["speeds"]).times(settings["inertia"]).plus(direction)
        found["speeds"] = direction
    return {"weights": weights.plus(direction.times(-settings["lr"])), **found}


_FORMULAS = {"adam": _adam, "adamw": _adam, "sgd": _sgd, "rmsprop": _rmsprop}
_KEYS = {"adam": ("means", "squares", "steps"), "adamw": ("means", "squares", "steps"), "sgd": ("speeds",)}
_KEYS["rmsprop"] = ("squares", "speeds")


def _place(state: dict[str, list[Any]], index: int) -> int | None:
    """Where a parameter's state is in the lists; some optimizers list which parameters they have any for."""
    if "which" not in state:
        return index
    listed = [int(number) for number in state["which"]]
    return listed.index(index) if index in listed else None


def _has(state: dict[str, list[Any]], key: str, index: int) -> bool:
    return bool(state.get(key)) and _place(state, index) is not None


def _of(state: dict[str, list[Any]], key: str, index: int) -> Any:
    place = _place(state, index)
    return state[key][place] if place is not None else np.asarray(math.nan)


def _array(tensor: Any) -> Array:
    found: Array = tensor if isinstance(tensor, np.ndarray) else tensor.double().numpy()
    return found


def _kind(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _norm(array: Array) -> float:
    return float(np.linalg.norm(np.ravel(array)))


def _rms(arrays: dict[str, Array]) -> float:
    count = sum(array.size for array in arrays.values())
    return math.sqrt(sum(float(np.sum(array**2)) for array in arrays.values()) / max(1, count))


def _finite(arrays: dict[str, Array | None]) -> bool:
    return all(array is None or bool(np.isfinite(array).all()) for array in arrays.values())


def _relative(difference: float, allowed: float, length: float) -> tuple[float, float]:
    """Both as a share of the tensor's own length, where it has one."""
    return (difference / length, allowed / length) if length > 0 else (difference, allowed)


def _entries(worst: Worst, difference: Array, bound: Array, length: float, where: str) -> None:
    """Every entry against its own bound; shown is the worst one, as a share of the tensor's largest possible entry, its length."""
    if difference.size == 0:
        return
    size = np.abs(difference)
    if difference.shape != bound.shape or not np.isfinite(size).all():
        worst.add(math.nan, 0.0, where)
        return
    place = np.unravel_index(int(np.argmax(size / bound)), size.shape)
    worst.add(*_relative(float(size[place]), float(bound[place]), length), where)
