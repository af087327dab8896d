"""Gradients and updates of the ranks against those of one process: how far apart rounding may put them, and what explains more than that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import isclose

import numpy as np

from lockstep.verify.foreign.finding import GRADIENT, UPDATE, Finding
from lockstep.verify.foreign.numbers import combined, distances, factor, listed, names, own, sizes_apart, units
from lockstep.verify.foreign.records import Array, Step, Truths
from lockstep.verify.foreign.tolerance import TOO_MUCH, Tolerance

Note = Callable[[str, float, float, str], None]

# Gradients that are so much smaller than the others, entry by entry, are rounding alone, as that of a bias before batch norm.
NEGLIGIBLE = 1e-3
# So are updates that change the weights by so many roundings at most.
ROUNDINGS = 8
# Rounding to 16 bits moves a gradient by less than this share of it.
ROUNDED = 2.0**-7
# A factor is told apart from noise (dropout) if it is at least this far from 1.
CLEAR = 1.5


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
        return _blind("gradient", tolerance, allowed, one, at)
    key, text, is_open = _cause(steps, one, way, wrong, float(np.median(allowed)))
    return Finding(at + 1, GRADIENT, key, text, open=is_open)


def _blind(what: str, tolerance: Tolerance, allowed: Array, one: Step, at: int) -> Finding | None:
    """Whether so much is allowed that nothing is proven, and what can be done about that."""
    noted = _sizes(one.exchanged, one) > NEGLIGIBLE
    if what == "update" and not tolerance.coarse:
        noted &= ~_within_rounding(one)
    blind = tolerance.says_nothing(allowed) & (noted | ~np.isfinite(allowed))
    if not blind.any():
        return None
    most = float(allowed[blind].max())
    how = f"changes so much that {most:.0%} of it has to be allowed" if np.isfinite(most) else "is not finite"
    # What the first step computes does not depend on the learning rate.
    advice = "prove it in float32" if tolerance.coarse else "seed whatever is random"
    advice += f", or take a smaller learning rate or fewer steps (--steps {at})" if at else ""
    text = (
        f"with weights that are a few roundings away, the {what} of one process {how} ({_listed(one, blind)}): a fault could pass for "
        f"rounding; {advice}"
    )
    return Finding(at + 1, GRADIENT if what == "gradient" else UPDATE, "rounding", text, open=True)


def _within_rounding(step: Step) -> Truths:
    """Where a learning rate that warms up changes the weights by a few roundings: what comes of that is rounding alone."""
    small = np.abs(units(step) * step.weights)
    return np.array(
        [np.linalg.norm(step.update[part]) <= ROUNDINGS * np.linalg.norm(small[part]) for part in step.slices],
        dtype=bool,
    )


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
    count = len(one.line.layout)
    if not count:
        return
    known = tolerance.updates(at, count)
    away, allowed = distances(step.update, one.update, one), known + tolerance.single_signs(one, at)
    if tolerance.takes_signs(at):
        # Where too many of them are open, how large the update is can be told all the same.
        by_size = (away <= allowed) & (allowed >= TOO_MUCH) & np.isfinite(allowed)
        by_size &= (_sizes(one.exchanged, one) > NEGLIGIBLE) & ~_within_rounding(one)
        sizes = tolerance.sizes(at, count)
        away = np.where(by_size, sizes_apart(step.update, one.update, one), away)
        known, allowed = np.where(by_size, sizes, known), np.where(by_size, sizes, allowed)
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
        if blind := _blind("update", tolerance, known, one, at):
            yield blind
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
