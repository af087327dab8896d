"""How a model is called, and in which number format it gets its inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lockstep.data.inputs import Inputs, mapped


def call(model: nn.Module, inputs: Inputs) -> Any:
    """Several inputs are several arguments: in their order, or by their names."""
    if isinstance(inputs, Tensor):
        return model(inputs)
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def number_type(model: nn.Module) -> torch.dtype:
    """Of its first parameter with a point: what it computes in. Complex numbers are made of two such."""
    return next(
        (p.dtype.to_real() for p in model.parameters() if p.is_floating_point() or p.is_complex()), torch.float32
    )


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Numbers with a point in this format; all others as they are."""
    if isinstance(inputs, Tensor) and inputs.dtype is dtype:
        return inputs
    return mapped(inputs, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
