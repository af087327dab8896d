"""Sketches of tensors compared: what rounding may do to a sum, how far two gradients are apart, and which factor lies between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from lockstep.verify.foreign.records import Array, Step, Truths

# Unit roundoff of each format.
UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
MARGIN = 4.0  # for orders of operations that the bound does not follow
SMALLEST = 1e-37


def units(step: Step) -> Array:
    """The unit roundoff of every entry."""
    return np.repeat(
        [UNIT.get(tensor.type, UNIT["float32"]) for tensor in step.line.layout],
        [tensor.length for tensor in step.line.layout],
    )


def own(step: Step) -> Array:
    """A rank's own gradient, without the scale of mixed precision."""
    return step.own / step.line.scale


def raw(step: Step) -> Array:
    """The gradient before any exchange; of parameters that the ranks have divided, as it was handed to the update."""
    divided = np.repeat([tensor.divided for tensor in step.line.layout], [tensor.length for tensor in step.line.layout])
    return np.where(divided, step.exchanged, own(step)) if divided.any() else own(step)


def combined(steps: list[Step]) -> dict[str, tuple[Array, Array]]:
    """What an exchange can make of the ranks' own gradients, each with a bound on its rounding: mean, mean by sample, sum."""
    gradients = np.array([own(step) for step in steps])
    sizes = np.array([step.size / step.line.scale for step in steps])
    passes = max(len(step.line.losses) for step in steps)
    rounding = MARGIN * (passes + len(steps) + 3) * units(steps[0])
    rows = np.array([step.rows for step in steps], dtype=np.float64)
    ways = {"mean": np.full(len(steps), 1.0 / len(steps))}
    if rows.min() > 0 and rows.min() != rows.max():
        ways["weighted"] = rows / rows.sum()
    ways["sum"] = np.ones(len(steps))
    return {way: (weights @ gradients, rounding * (weights @ sizes) + SMALLEST) for way, weights in ways.items()}


def beyond(difference: Array, bound: Array, step: Step) -> Array:
    """For each parameter, by how many times its worst entry is beyond its bound; NaN is beyond everything."""
    ratio = np.abs(difference) / bound
    ratio[~np.isfinite(ratio)] = np.inf
    return np.array([ratio[part].max(initial=0.0) for part in step.slices])


def distances(found: Array, right: Array, step: Step) -> Array:
    """For each parameter, the distance as a share of its length; what is negligible beside the whole gradient is rounding alone."""
    return _shares(right, step, lambda part: float(np.linalg.norm(found[part] - right[part])))


def sizes_apart(found: Array, right: Array, step: Step) -> Array:
    """For each parameter, how far the lengths are apart, in the same way, whatever the directions are."""
    return _shares(right, step, lambda part: abs(float(np.linalg.norm(found[part]) - np.linalg.norm(right[part]))))


def _shares(right: Array, step: Step, away: Callable[[slice], float]) -> Array:
    whole = float(np.linalg.norm(right)) / max(1.0, np.sqrt(len(right)))
    result = []
    for part in step.slices:
        least = 4 * UNIT["float32"] * whole * np.sqrt(max(1, part.stop - part.start))
        length = float(np.linalg.norm(right[part])) + least + SMALLEST
        result.append(away(part) / length if np.isfinite(away(part)) else np.inf)
    return np.array(result)


def factor(found: Array, right: Array) -> tuple[float, float]:
    """The number f for which f times `right` is nearest to `found`, and how far that is, as a share of `found`."""
    square, length = float(right @ right), float(np.linalg.norm(found))
    if not square > 0 or not np.isfinite(length) or not length > 0:
        return 1.0, float("inf") if length != 0 else 0.0
    f = float(found @ right) / square
    return f, float(np.linalg.norm(found - f * right)) / length


def names(step: Step, which: Truths) -> Iterator[str]:
    """The names of the parameters for which this holds."""
    return (tensor.name for tensor, held in zip(step.line.layout, which, strict=True) if held)


def listed(names: list[str]) -> str:
    """At most two of them by name."""
    if len(names) <= 2:
        return " and ".join(f"'{name}'" for name in names)
    return f"'{names[0]}' and {len(names) - 1} more"
