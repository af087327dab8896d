"""Early stopping: when nothing has become better for a while, stop, and go back to the best weights.

The results it looks at are the same on all ranks, so all of them decide alike without asking each other.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from lockstep.recipe import EarlyStopping
from lockstep.training.evaluate import Evaluation
from lockstep.training.state import whole_state


@dataclass
class Standing:
    """The best result so far."""

    best: float | None = None
    epoch: int = 0
    waited: int = 0


class Stopping:
    """Knows the best epoch, and keeps its weights where the recipe stops early."""

    def __init__(self, settings: EarlyStopping, standing: dict[str, Any] | None = None) -> None:
        self._settings = settings
        self._standing = Standing(**(standing or {}))
        self._weights: dict[str, torch.Tensor] | None = None

    @property
    def best_epoch(self) -> int:
        return self._standing.epoch

    def better(self, epoch: int, test: Evaluation) -> bool:
        """Whether this epoch is the best so far; counts the wait otherwise."""
        on_loss = self._settings.on == "test_loss"
        value = -test.loss if on_loss else test.accuracy
        standing = self._standing
        least = self._settings.min_delta if standing.best is not None else 0.0
        if standing.best is None or value > standing.best + least:
            self._standing = Standing(value, epoch)
            return True
        standing.waited += 1
        return False

    def keep(self, model: nn.Module) -> None:
        """Remember these weights as the best ones. Collective, as `whole_state` is."""
        if self._settings.patience:
            self._weights = {name: tensor.clone() for name, tensor in whole_state(model).items()}

    def best(self) -> dict[str, torch.Tensor] | None:
        """The best weights, if they are not the last ones."""
        return self._weights if self._standing.waited else None

    def reason(self) -> str | None:
        """Why to stop now, if so."""
        settings, standing = self._settings, self._standing
        if not settings.patience or standing.waited < settings.patience:
            return None
        return f"early stopping: no better {settings.on.replace('_', ' ')} for {standing.waited} epochs; best in epoch {standing.epoch}"

    def state(self) -> dict[str, Any]:
        return asdict(self._standing)

    def best_weights(self) -> dict[str, torch.Tensor]:
        return self._weights or {}

    def load_best_weights(self, weights: dict[str, torch.Tensor]) -> None:
        self._weights = weights or None
