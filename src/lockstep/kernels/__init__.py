"""A convolution with bias, and perhaps ReLU and 2x2 max-pool, forward and backward, for where it is faster than PyTorch's operators.

May import measure/, machine/ and the files at the top. Its door is `fuse`, for a model, and `FusedConvReLU` and `FastConv`, for a layer of one's own.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.kernels.fusing import fuse
    from lockstep.kernels.module import FastConv, FusedConvReLU

_WHERE = {"FastConv": "module", "FusedConvReLU": "module", "fuse": "fusing"}

__all__ = ["FastConv", "FusedConvReLU", "fuse"]


def __getattr__(name: str) -> Any:
    """Imported when it is first used: who only has the kernels compiled needs no torch."""
    if name not in _WHERE:
        raise AttributeError(f"module 'lockstep.kernels' has no attribute '{name}'")
    return getattr(import_module(f"lockstep.kernels.{_WHERE[name]}"), name)
