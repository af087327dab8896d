"""Gradients and updates of the ranks against those of one process: how far apart rounding may put them, and what explains more than that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import isclose

import numpy as np

from lockstep.verify.foreign.finding import GRADIENT, UPDATE, Finding
from lockstep.verify.foreign.numbers import combined, distances, factor, listed, names, own, raw
from lockstep.verify.foreign.records import Array, Rank, Step, Truths, is_coarse

Note = Callable[[str, float, float, str], None]

# What a difference from one process has to exceed at least, as a share of a parameter's gradient or update: where a ReLU or a max-pool is as near
# to its kink as rounding, the gradient of a small batch jumps by a part of it.
FLOOR, LOSS_FLOOR = 3e-3, 1e-4
# In 16 bits, eight roundings.
COARSE_FLOOR, COARSE_LOSS_FLOOR = 2.0**-5, 1e-2
TIMES = 6.0
# Where so much is allowed, a fault could be taken for rounding, and nothing is proven.
TOO_MUCH = 0.5
# But for gradients that are so much smaller than the others, entry by entry: they are rounding alone, as that of a bias before batch norm.
NEGLIGIBLE = 1e-3
# Rounding to 16 bits moves a gradient by less than this share of it.
ROUNDED = 2.0**-7
# A factor is told apart from noise (dropout) if it is at least this far from 1.
CLEAR = 1.5


class Tolerance:
    """What rounding does to this script, measured: its one process against the same with weights that are a few roundings away.

    It grows from step to step, as rounding does, and holds for each parameter by itself.
    """

    def __init__(self, one: Rank, twin: Rank) -> None:
        self._coarse = is_coarse([one])
        self._floor, self._loss_floor = (COARSE_FLOOR, COARSE_LOSS_FLOOR) if self._coarse else (FLOOR, LOSS_FLOOR)
        self._gradients: list[Array] = []
        self._updates: list[Array] = []
        self._losses: list[float] = []
        for ours, theirs in zip(one, twin, strict=False):
            if len(ours.own) != len(theirs.own):
                break
            self._gradients.append(self._grown(self._gradients, distances(raw(theirs), raw(ours), ours)))
            self._updates.append(self._grown(self._updates, distances(theirs.update, ours.update, ours)))
            a, b = ours.loss, theirs.loss
            away = abs(a - b) / (abs(a) or 1.0) if a is not None and b is not None else 0.0
            self._losses.append(max([away, *self._losses[-1:]]))

    @staticmethod
    def _grown(before: list[Array], now: Array) -> Array:
        same = before and len(before[-1]) == len(now)
        return np.maximum(now, before[-1]) if same else now

    def gradients(self, at: int, count: int) -> Array:
        return self._allowed(self._gradients, at, count)

    def updates(self, at: int, count: int) -> Array:
        return self._allowed(self._updates, at, count)

    def _allowed(self, measured: list[Array], at: int, count: int) -> Array:
        found = measured[at] if at < len(measured) and len(measured[at]) == count else np.zeros(count)
        return np.maximum(self._floor, TIMES * found)

    def says_nothing(self, allowed: Array) -> Truths:
        """For which parameters it is so large that it would pass a fault. In 16 bits, one ReLU at its kink moves the gradient of a whole layer:
        there, it takes half of the parameters."""
        found: Truths = allowed >= TOO_MUCH
        if self._coarse and float(np.median(allowed)) < TOO_MUCH:
            found = ~np.isfinite(allowed)
        return found

    def share(self, at: int) -> float:
        """For the gradient as a whole."""
        measured = (
            float(np.median(self._gradients[at])) if at < len(self._gradients) and len(self._gradients[at]) else 0.0
        )
        return max(self._floor, TIMES * measured)

    def loss(self, at: int) -> float:
        return max(self._loss_floor, TIMES * self._losses[at] if at < len(self._losses) else 0.0)


def gradient(steps: list[Step], one: Step, way: str, tolerance: Tolerance, at: int, note: Note) -> Finding | None:
    """The gradient that the ranks have after the exchange, against that of one process."""
    ours, right = steps[0].exchanged, one.exchanged
    away, allowed = distances(ours, right, one), tolerance.gradients(at, len(one.line.layout))
    worst = _worst(away, allowed)
    if len(away):
        note(
            "gradient against one process",
            float(away[worst]),
            float(allowed[worst]),
            f"step {at + 1}, {steps[0].line.layout[worst].name}",
        )
    if not np.isfinite(right).all():
        text = f"the gradient of one process is not finite ({_listed(one, ~_finite(right, one))}): NaN never passes"
        return Finding(at + 1, GRADIENT, "not finite", text, open=True)
    wrong = away > allowed
    if not wrong.any():
        blind = tolerance.says_nothing(allowed) & ((_sizes(right, one) > NEGLIGIBLE) | ~np.isfinite(allowed))
        return _blind(allowed, blind, "gradient", one, at) if blind.any() else None
    key, text, is_open = _cause(steps, one, way, wrong, float(np.median(allowed)))
    return Finding(at + 1, GRADIENT, key, text, open=is_open)


def _blind(allowed: Array, which: Truths, what: str, one: Step, at: int) -> Finding:
    most = float(allowed[which].max()) / TIMES
    how = f"changes by {most:.0%}, and {TIMES:.0f} times that is allowed" if np.isfinite(most) else "is not finite"
    text = (
        f"with weights that are a few roundings away, the {what} of one process {how} ({_listed(one, which)}): a fault could pass for "
        "rounding; seed whatever is random, or take a smaller learning rate or fewer steps (--steps)"
    )
    return Finding(at + 1, GRADIENT if what == "gradient" else UPDATE, "rounding", text, open=True)


def _worst(away: Array, allowed: Array) -> int:
    """The parameter that is nearest to what is allowed, or beyond it."""
    with np.errstate(invalid="ignore"):  # infinite, and anything allowed
        return int(np.argmax(np.nan_to_num(away / allowed, nan=np.inf, posinf=np.inf))) if len(away) else 0


def _finite(found: Array, step: Step) -> Truths:
    return np.array([bool(np.isfinite(found[part]).all()) for part in step.slices])


def _sizes(found: Array, step: Step) -> Array:
    """For each parameter, the usual size of its entries beside that of all."""
    whole = float(np.linalg.norm(found)) / max(1.0, np.sqrt(len(found))) or 1.0
    return (
        np.array([float(np.linalg.norm(found[part])) / np.sqrt(max(1, part.stop - part.start)) for part in step.slices])
        / whole
    )


def _listed(step: Step, which: Truths) -> str:
    return listed(list(names(step, which)))


def _cause(steps: list[Step], one: Step, way: str, wrong: Truths, allowed: float) -> tuple[str, str, bool]:
    ranks, first = len(steps), steps[0]
    times, rest = factor(first.exchanged, one.exchanged)
    ways = {each: value for each, (value, _) in combined(steps).items()}
    if "weighted" in ways:
        ways["weighted sum"] = ways["weighted"] * ranks
    right = [each for each, value in ways.items() if _near(value, own(one), allowed)]
    said = f"gradients of {ranks} ranks are {times:.2f} times those of one process"
    if way == "sum" and "mean" in right:
        return (
            "summed",
            f"{said}: they are summed, not averaged (or the loss is divided by the local batch only)",
            False,
        )
    if way in ("mean", "weighted") and "sum" in right:
        text = f"{said}: they are averaged, but a rank's loss is not the mean over its own samples: sum the gradients, or divide the loss by the local batch"
        return "averaged", text, False
    rows = sorted({step.rows for step in steps})
    if (way == "mean" and "weighted" in right) or (way == "sum" and "weighted sum" in right):
        shares = " and ".join(str(step.rows) for step in steps)
        text = f"ranks with {shares} samples are averaged as if they had as many each: weigh each rank by its samples"
        return "weighed", text, False
    formats = {tensor.format for tensor in first.line.layout} - {tensor.format for tensor in one.line.layout}
    if formats and isclose(times, 1.0, rel_tol=ROUNDED) and rest < ROUNDED:
        return "rounded", f"gradients are rounded to {min(formats)} on their way", False
    noise = any(step.dropout or step.draws for step in [*steps, one])
    if rest < max(allowed, 1e-3) or (noise and not 1 / CLEAR < times < CLEAR):
        why, passes = "", len(one.line.losses)
        if passes > 1 and isclose(times, passes, rel_tol=0.05):
            why = f": the loss is not divided by the {passes} accumulated passes"
        elif isclose(times, ranks, rel_tol=0.05):
            why = f": the loss, or the gradient, is multiplied by the {ranks} ranks"
        elif isclose(times, 1 / ranks, rel_tol=0.05):
            why = f": the loss, or the gradient, is divided by the {ranks} ranks once too often"
        return "scaled", f"{said}{why}", False
    if any(step.batch_norm for step in steps):
        share = f"{rows[-1]} of {one.rows} samples" if rows and one.rows else "its own samples"
        text = f"batch norm normalises by {share} on each rank: torch.nn.SyncBatchNorm takes all of them"
        return "batch norm", text, False
    if noise:
        what = "dropout draws" if any(step.dropout for step in steps) else "the forward pass draws random numbers:"
        alike = len({step.line.passes[0].random for step in steps if step.line.passes}) == 1
        seeds = "the same masks on every rank" if alike else "other masks on each rank"
        text = f"{what} {seeds} than one process has, as is to be expected; --no-dropout sets every dropout to 0 for the proof"
        return (
            "dropout",
            text.replace("same masks on every rank than", "same masks on every rank, and others than"),
            True,
        )
    idle = [number for number, step in enumerate(steps) if not step.own.any() and step.rows]
    if idle and one.own.any():
        return "idle rank", f"rank {idle[0]} computes no gradient from its {steps[idle[0]].rows} samples", False
    size = float(np.linalg.norm(first.exchanged - one.exchanged) / (np.linalg.norm(one.exchanged) or 1.0))
    text = (
        f"the ranks' gradients are {size:.2%} away from those of one process ({_listed(first, wrong)}), at the same weights and "
        "inputs: labels that differ, or a loss or a layer that depends on a rank's share of the batch"
    )
    return "gradient", text, False


def _near(value: Array, right: Array, allowed: float) -> bool:
    return bool(np.linalg.norm(value - right) <= allowed * np.linalg.norm(right))


def update(step: Step, one: Step, tolerance: Tolerance, at: int, note: Note) -> Iterator[Finding]:
    """What the step has changed in the weights."""
    away, allowed = distances(step.update, one.update, one), tolerance.updates(at, len(one.line.layout))
    if not len(away):
        return
    worst = _worst(away, allowed)
    note(
        "update against one process",
        float(away[worst]),
        float(allowed[worst]),
        f"step {at + 1}, {step.line.layout[worst].name}",
    )
    if not np.isfinite(one.update).all():
        text = f"the update of one process is not finite ({_listed(one, ~_finite(one.update, one))}): NaN never passes"
        yield Finding(at + 1, UPDATE, "not finite", text, open=True)
        return
    wrong = away > allowed
    if not wrong.any():
        # By the median: Adam makes steps of one size also of gradients that are rounding alone.
        if float(np.median(allowed)) >= TOO_MUCH:
            yield _blind(allowed, allowed >= TOO_MUCH, "update", one, at)
        return
    named = _listed(step, wrong)
    part = one.slices[worst]
    if not step.update[part].any() and one.update[part].any():
        yield Finding(
            at + 1, UPDATE, "not updated", f"weights that one process updates stay as they are on the ranks ({named})"
        )
        return
    times, rest = factor(step.update, one.update)
    how = (
        f"{times:.4g} times those of one process"
        if rest < 1e-3
        else f"{away[worst]:.2%} away from those of one process"
    )
    yield Finding(at + 1, UPDATE, "update", f"updates are {how} ({named}), though gradients and settings are the same")
