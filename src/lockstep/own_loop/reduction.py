"""Whether a loss is a mean: `step.backward` wants the sum over the rank's samples, and autograd's graph knows what it was given."""

from __future__ import annotations

from typing import Any

import torch

_MEAN = 1  # as torch's loss functions number their reductions
# Nodes that hand a number on as it is, or add others to it.
_PLAIN = ("AddBackward0", "SubBackward0", "NegBackward0", "ToCopyBackward0", "CloneBackward0", "ViewBackward0", "SqueezeBackward0")  # fmt: skip
_DEEPEST = 8


def mean_over(loss: torch.Tensor, samples: int) -> str | None:
    """The operation that made a mean of a loss over `samples` samples; None where it is a sum, or nobody can tell."""
    return _mean(loss.grad_fn, samples, _DEEPEST)


def _mean(node: Any, samples: int, depth: int) -> str | None:
    if node is None or depth == 0:
        return None
    name = str(node.name())
    if hasattr(node, "_saved_reduction"):
        return name if node._saved_reduction == _MEAN else None
    if name == "MeanBackward0":
        return name if int(node._saved_self_sym_numel) > 1 else None
    if name.startswith(("MulBackward", "DivBackward")):
        by = _number(node._saved_other)
        if by is None or (name.startswith("Mul") and by > 1):
            return None  # a product of two losses, or a mean that was multiplied by its count
        if name.startswith("Div") and by == samples:
            return f"{name} by {samples}"
    elif name not in _PLAIN:
        return None
    found = (_mean(before, samples, depth - 1) for before, _ in node.next_functions)
    return next((mean for mean in found if mean), None)


def _number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        return float(value) if value.dim() == 0 and not value.requires_grad else None
    return None if value is None else float(value)
