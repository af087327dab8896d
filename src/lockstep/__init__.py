"""Lockstep: a lab bench for data-parallel training on PyTorch.

The public surface. Names are imported when they are first used, so `import lockstep` does not import torch.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # typing itself takes as long to import as all of this twice over
if TYPE_CHECKING:
    from typing import Any

    from lockstep.api.calls import explain, race, run, study, verify
    from lockstep.api.results import Run
    from lockstep.data import open_data
    from lockstep.errors import InputError, LockstepError
    from lockstep.placement import Placement
    from lockstep.recipe import Optimizer, Recipe
    from lockstep.training.start import session

_WHERE = {
    "InputError": "errors",
    "LockstepError": "errors",
    "Optimizer": "recipe",
    "Placement": "placement",
    "Recipe": "recipe",
    "Run": "api.results",
    "explain": "api.calls",
    "open_data": "data",
    "race": "api.calls",
    "run": "api.calls",
    "session": "training.start",
    "study": "api.calls",
    "verify": "api.calls",
}

__all__ = [
    "InputError",
    "LockstepError",
    "Optimizer",
    "Placement",
    "Recipe",
    "Run",
    "explain",
    "open_data",
    "race",
    "run",
    "session",
    "study",
    "verify",
]


class _Surface(type(sys)):  # type: ignore[misc]
    """Importing `lockstep.run`, the package, would put it in the place of `lockstep.run`, the function (docs/decisions/0041-names-of-rooms.md)."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _WHERE or not isinstance(value, type(sys)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Surface


if not TYPE_CHECKING:  # to a type checker, what is not above is not there

    def __getattr__(name: str) -> Any:
        if name not in _WHERE:
            raise AttributeError(f"module 'lockstep' has no attribute '{name}'")
        import importlib

        return getattr(importlib.import_module(f"lockstep.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return __all__
