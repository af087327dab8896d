"""What a model is called with: one tensor, several in their order, or several by name."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Inputs = Tensor | tuple[Tensor, ...] | dict[str, Tensor]


def leaves(inputs: Inputs) -> list[Tensor]:
    """Its tensors, in order."""
    if isinstance(inputs, Tensor):
        return [inputs]
    return list(inputs.values() if isinstance(inputs, dict) else inputs)


def samples(inputs: Inputs) -> int:
    return len(leaves(inputs)[0])


def mapped(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """The same with every tensor changed."""
    if isinstance(inputs, Tensor):
        return change(inputs)
    if isinstance(inputs, dict):
        return {key: change(tensor) for key, tensor in inputs.items()}
    return tuple(change(tensor) for tensor in inputs)
