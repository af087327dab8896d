"""Whether a loss is a mean: `step.backward` wants the sum over the rank's samples, and autograd's graph knows what it was given.

Only what is certain is refused. A loss may have other parts, such as a penalty that is the mean of some weights. What a loss
function made counts for more than what `sum` and `mean` made, and then a sum for more than a mean; and a mean whose shape is
not that of the samples may be of anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch

from lockstep.torch_private import saved

_MEAN, _SUM = 1, 2  # as torch's loss functions number their reductions
# Nodes that hand a number on as it is.
_PLAIN = ("NegBackward0", "ToCopyBackward0", "CloneBackward0", "ViewBackward0", "SqueezeBackward0")
_ADDING = ("AddBackward0", "SubBackward0")
_DEEPEST = 8


class _Part(NamedTuple):
    """What is known of one part of a loss, and the node that says so."""

    kind: Literal["mean", "sum"]
    node: str
    by_loss_function: bool

    @property
    def weight(self) -> tuple[bool, bool]:
        return self.by_loss_function, self.kind == "sum"


def mean_over(loss: torch.Tensor, samples: int) -> str | None:
    """The operation that made a mean of a loss over `samples` samples; None where it is a sum, or nobody can tell."""
    part = _part(loss.grad_fn, samples, _DEEPEST)
    return part.node if part and part.kind == "mean" else None


def _part(node: Any, samples: int, depth: int) -> _Part | None:
    if node is None or depth == 0:
        return None
    name = str(node.name())
    number = saved(node, "reduction")
    if number is not None:
        reduction = {_MEAN: "mean", _SUM: "sum"}.get(number)
        # Classes are those of samples, however many passes they are divided into; numbers may be weights and their targets.
        if not name.startswith("NllLoss"):
            reduction = _over(samples, getattr(saved(node, "self"), "shape", ()), reduction)
        return _made(reduction, name, True)
    if name in ("MeanBackward0", "SumBackward0"):
        reduction = _over(samples, saved(node, "self_sym_sizes"), "mean" if name.startswith("Mean") else "sum")
        return _made(reduction, name, False)
    before = [_part(each, samples, depth - 1) for each, _ in node.next_functions]
    if name in _ADDING:
        return max((part for part in before if part), key=lambda part: part.weight, default=None)
    if name.startswith(("MulBackward", "DivBackward")):
        return _scaled(name, _number(saved(node, "other")), before[0], samples)
    return before[0] if name in _PLAIN else None


def _over(samples: int, shape: Sequence[Any], reduction: str | None) -> str | None:
    """The reduction if it was over the samples, which the shape must show."""
    return reduction if len(shape) > 0 and int(shape[0]) == samples else None


def _made(reduction: str | None, node: str, by_loss_function: bool) -> _Part | None:
    return _Part("mean" if reduction == "mean" else "sum", node, by_loss_function) if reduction else None


def _scaled(name: str, by: float | None, part: _Part | None, samples: int) -> _Part | None:
    """A part times or over a number; of a product of two losses nothing is known."""
    if by is None or part is None:
        return None
    if name.startswith("Mul") and by > 1 and part.kind == "mean":
        return part._replace(kind="sum", node=name)  # most likely by the mean's count
    if name.startswith("Div") and by == samples and part.kind == "sum":
        return part._replace(kind="mean", node=f"{name} by {samples}")
    return part


def _number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        return float(value) if value.dim() == 0 and not value.requires_grad else None
    return None if value is None else float(value)
