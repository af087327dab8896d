"""What the exchange has made of the ranks' own gradients, found within the run of the ranks alone: to rounding, whatever one process does."""

from __future__ import annotations

from dataclasses import dataclass
from math import isclose

import numpy as np

from lockstep.verify.foreign.finding import EXCHANGE, Finding
from lockstep.verify.foreign.numbers import UNIT, beyond, combined, factor, listed, names, own, units
from lockstep.verify.foreign.records import Array, Step, Truths

# A gradient that is this near to a multiple of another one is that multiple.
NEAR = 1e-4
# Rounding to 16 bits moves a gradient by less than this share of it.
COARSE = 2.0**-7


@dataclass(frozen=True)
class Exchanged:
    """One step's exchange."""

    way: str
    """mean, weighted (by samples), sum, or "" where it is none of them."""
    difference: float
    """From that way, as a share of the gradient: the worst parameter's."""
    allowed: float
    finding: Finding | None = None


def exchanged(steps: list[Step], before: list[Step] | None) -> Exchanged | None:
    """Judge one step of all ranks. None where their own gradients were not seen. `before`: the step before, of the same optimizer."""
    first = steps[0]
    seen = np.array([all(each) for each in zip(*([t.seen for t in s.line.layout] for s in steps), strict=True)])
    if not seen.any() or len({len(step.own) for step in steps}) > 1:
        return None
    ways = combined(steps)
    off = {
        way: np.where(seen, np.max([beyond(step.exchanged - value, bound, step) for step in steps], axis=0), 0.0)
        for way, (value, bound) in ways.items()
    }
    way = min(off, key=lambda each: int((off[each] > 1).sum()))
    value, bound = ways[way]
    length = float(np.linalg.norm(value)) or 1.0
    worst = max(float(np.linalg.norm(step.exchanged - value)) for step in steps) / length
    allowed = float(np.linalg.norm(bound)) / length
    wrong = off[way] > 1
    if not wrong.any():
        return Exchanged(way, min(worst, allowed), allowed)
    key, text = _cause(steps, before, wrong, ways)
    name = "" if wrong.all() else f" ({listed(list(names(first, wrong)))})"
    return Exchanged("", worst, allowed, Finding(first.line.step, EXCHANGE, key, text.replace("NAMES", name)))


def _cause(
    steps: list[Step], before: list[Step] | None, wrong: Truths, ways: dict[str, tuple[Array, Array]]
) -> tuple[str, str]:
    first, entries = steps[0], _entries(steps[0], wrong)
    if all(_same(step.exchanged, own(step), step, entries) for step in steps):
        if first.line.clips and all(np.array_equal(step.final, first.final) for step in steps[1:]):
            return "clipped before", "every rank clips its own gradient before the exchange: clip what was exchanged"
        if wrong.all():
            return "no exchange", "the gradients are not exchanged: every rank updates with its own"
        return "left out", "the exchange leaves parameters outNAMES: every rank updates them with its own gradient"
    if before is not None and len(before[0].own) == len(first.own):
        for value, bound in combined(before).values():
            if all((np.abs(step.exchanged - value) <= bound)[entries].all() for step in steps):
                return "stale", "the gradient is that of the step before: a stale bucketNAMES"
    for rank, step in enumerate(steps):
        if all(_same(each.exchanged, own(step), each, entries) for each in steps):
            return "one rank's", f"every rank gets the gradient of rank {rank} aloneNAMES"
    word, (value, bound) = min(ways.items(), key=lambda way: float(np.linalg.norm(first.exchanged - way[1][0])))
    word = "sum" if word == "sum" else "mean"
    right = [bool((np.abs(step.exchanged - value) <= bound)[entries].all()) for step in steps]
    if any(right):
        return "one rank", f"rank {right.index(False)} gets another gradient than the {word} of the ranks'NAMES"
    times, rest = factor(first.exchanged[entries], value[entries])
    if rest < NEAR:
        ranks = len(steps)
        said = f"gradients are {times:.4g} times the {word} of the ranks'"
        if isclose(times, 1 / ranks, rel_tol=1e-3):
            return "divided twice", f"{said}: divided by {ranks} once too oftenNAMES"
        return "scaled", f"{said}NAMES"
    formats = {tensor.format for tensor, held in zip(first.line.layout, wrong, strict=True) if held and tensor.format}
    raw = {tensor.own_format for tensor, held in zip(first.line.layout, wrong, strict=True) if held}
    if formats and rest < COARSE and not formats & raw:
        return "rounded", f"gradients are rounded to {min(formats)} on their wayNAMES"
    away = float(np.linalg.norm((first.exchanged - value)[entries]) / (np.linalg.norm(value[entries]) or 1.0))
    text = f"what the ranks get is not made of their own gradients: {away:.2%} away from their {word}NAMES"
    return "exchange", text if np.isfinite(
        away
    ) else "the exchanged gradient is not finite, and the ranks' own areNAMES"


def _entries(step: Step, wrong: Truths) -> Truths:
    return np.repeat(wrong, [tensor.length for tensor in step.line.layout])


def _same(found: Array, right: Array, step: Step, entries: Truths) -> bool:
    """Up to a few roundings."""
    return bool((np.abs(found - right) <= 16 * units(step) * step.size / step.line.scale + 1e-37)[entries].all())


def untouched(step: Step) -> tuple[bool, float]:
    """Whether one process hands its gradients to the update as they are, and the factor where it scales them."""
    bound = 64 * units(step) * step.size / step.line.scale + 1e-37
    if (np.abs(step.exchanged - own(step)) <= bound).all():
        return True, 1.0
    times, rest = factor(step.exchanged, own(step))
    return rest < 64 * UNIT["float32"], times
