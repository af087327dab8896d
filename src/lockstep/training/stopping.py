"""Early stopping: when nothing has become better for a while, stop, and go back to the best weights.

The results it looks at are the same on all ranks, so all of them decide alike without asking each other. It counts from where it
was turned on: the weights of epochs before that were not kept, and nobody could go back to them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from lockstep.recipe import EarlyStopping
from lockstep.training.evaluate import Evaluation
from lockstep.training.state import whole_state
from lockstep.units import counted


@dataclass
class Standing:
    """The best result so far."""

    best: float | None = None
    epoch: int = 0
    waited: int = 0


class Stopping:
    """Knows the best epoch, and keeps its weights where the recipe stops early."""

    def __init__(
        self,
        settings: EarlyStopping,
        standing: Standing | None = None,
        weights: dict[str, torch.Tensor] | None = None,
        before: EarlyStopping | None = None,
    ) -> None:
        """`standing` and `weights`: those of the run that goes on, whose settings were `before`."""
        self._settings = settings
        was_on = before is not None and before.on == settings.on and (before.patience > 0 or settings.patience == 0)
        self._standing = standing if standing and was_on else Standing()
        self._weights = weights if weights and was_on and settings.patience else None

    @property
    def best_epoch(self) -> int:
        return self._standing.epoch

    def better(self, epoch: int, test: Evaluation) -> bool:
        """Whether this epoch is the best so far; counts the wait otherwise."""
        value = test.accuracy if self._settings.on == "test_accuracy" else -test.loss
        standing = self._standing
        least = self._settings.min_delta if standing.best is not None else -math.inf
        if value > (standing.best or 0.0) + least:  # what is not a number is never better
            self._standing = Standing(value, epoch)
            return True
        self._standing = Standing(standing.best, standing.epoch, standing.waited + 1)
        return False

    def keep(self, model: nn.Module) -> None:
        """Remember these weights as the best ones. Collective, as `whole_state` is."""
        if self._settings.patience:
            self._weights = {name: tensor.clone() for name, tensor in whole_state(model).items()}

    def best(self) -> dict[str, torch.Tensor] | None:
        """The best weights, if they are not the last ones."""
        return self._weights if self._settings.patience and self._standing.waited else None

    def reason(self) -> str | None:
        """Why to stop now, if so."""
        settings, standing = self._settings, self._standing
        if not settings.patience or standing.waited < settings.patience:
            return None
        return f"early stopping: no better {settings.on.replace('_', ' ')} for {counted(standing.waited, 'epoch')}; best in epoch {standing.epoch}"

    @property
    def standing(self) -> Standing:
        return self._standing

    def best_weights(self) -> dict[str, torch.Tensor]:
        return self._weights or {}
