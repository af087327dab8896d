"""Lockstep: a lab bench for data-parallel training on PyTorch.

The public surface. Names are imported when they are first used, so `import lockstep` does not import torch.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing itself takes as long to import as all of this twice over
if TYPE_CHECKING:
    from typing import Any

    from lockstep.data import open_data
    from lockstep.errors import DataError, InputError, LockstepError, RunFailed
    from lockstep.launch import train
    from lockstep.placement import Placement
    from lockstep.recipe import Optimizer, Recipe
    from lockstep.run import Run
    from lockstep.training.start import session

_WHERE = {
    "DataError": "errors",
    "InputError": "errors",
    "LockstepError": "errors",
    "Optimizer": "recipe",
    "Placement": "placement",
    "Recipe": "recipe",
    "Run": "run",
    "RunFailed": "errors",
    "open_data": "data",
    "session": "training.start",
    "train": "launch",
}

__all__ = [
    "DataError",
    "InputError",
    "LockstepError",
    "Optimizer",
    "Placement",
    "Recipe",
    "Run",
    "RunFailed",
    "open_data",
    "session",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'lockstep' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(f"lockstep.{_WHERE[name]}"), name)
