"""Parameters that are divided over the ranks (fully_shard), made whole: sketches add up, so those of all ranks together are those of the whole."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from lockstep.verify.foreign.records import Array, Rank, Step, Tensor

# Sums in float64 that were added up in another order differ by less.
ROUNDING = 1e-9


def gathered(ranks: list[Rank]) -> list[Rank]:
    """The same ranks, each with whole gradients, weights and updates. Of a step that not all of them have, nothing can be made."""
    if not any(tensor.divided for rank in ranks for step in rank for tensor in step.line.layout):
        return ranks
    return [list(rank) for rank in zip(*map(_whole, zip(*ranks, strict=False)), strict=True)]


def _whole(steps: tuple[Step, ...]) -> list[Step]:
    layouts = [step.line.layout for step in steps]
    if len({tuple((tensor.name, tensor.length, tensor.divided) for tensor in layout) for layout in layouts}) > 1:
        return list(steps)  # the judge says that they do not update the same parameters
    lengths = [tensor.length for tensor in layouts[0]]
    divided = np.repeat([tensor.divided for tensor in layouts[0]], lengths)

    def whole(step: Step, quantity: str) -> Array:
        found: Array = np.where(divided, sum(getattr(each, quantity) for each in steps), getattr(step, quantity))
        return found

    found = []
    for step in steps:
        layout = [_tensor(tensor, [each[at] for each in layouts]) for at, tensor in enumerate(step.line.layout)]
        quantities = [whole(step, name) for name in ("exchanged", "final", "update", "weights")]
        found.append(Step(replace(step.line, layout=layout), step.own, step.size, *quantities))
    return found


def _tensor(tensor: Tensor, parts: list[Tensor]) -> Tensor:
    """The bits of the whole are those of all parts."""
    if not tensor.divided:
        return tensor
    before, after = (" ".join(getattr(part, name) for part in parts) for name in ("before", "after"))
    return replace(tensor, before=before, after=after)


def starts_alike(ours: Step, theirs: Step) -> bool:
    """Whether two first steps begin with the same weights: the same bits; of divided ones, the same sketch."""
    if len(ours.line.layout) != len(theirs.line.layout) or len(ours.weights) != len(theirs.weights):
        return False
    for mine, other, part in zip(ours.line.layout, theirs.line.layout, ours.slices, strict=True):
        if not (mine.divided or other.divided):
            if mine.before != other.before:
                return False
        elif not np.linalg.norm(ours.weights[part] - theirs.weights[part]) <= ROUNDING * _length(theirs.weights[part]):
            return False
    return True


def _length(weights: Array) -> float:
    return float(np.linalg.norm(weights)) or 1.0
