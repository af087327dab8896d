"""Setting an optimizer's learning rate before each step (schedule.py says what it is)."""

from __future__ import annotations

from lockstep.plan import Plan
from lockstep.recipe import Recipe
from lockstep.schedule import factor, two_phases
from lockstep.strategies.optimizer import Optimizer

# PyTorch's OneCycleLR moves momentum between these.
LEAST_MOMENTUM, MOST_MOMENTUM = 0.85, 0.95


class Pace:
    """Sets an optimizer's learning rate before each step."""

    def __init__(self, recipe: Recipe, plan: Plan, optimizer: Optimizer) -> None:
        self._schedule, self._plan, self._optimizer = recipe.schedule, plan, optimizer
        self._constant = recipe.schedule.name == "constant" and recipe.schedule.warmup_steps == 0
        self._cycles = recipe.schedule.name == "onecycle" and recipe.schedule.cycle_momentum and optimizer.momentum > 0
        optimizer.lr = plan.lr

    def set(self, step: int) -> None:
        """For step 0, 1, 2, … of the whole run."""
        if self._constant:
            return
        schedule, plan = self._schedule, self._plan
        self._optimizer.lr = plan.lr * factor(schedule, step, plan.total_steps, plan.steps_per_epoch)
        if self._cycles:
            warm = schedule.warmup_steps
            self._optimizer.momentum = two_phases(
                schedule,
                max(0, step - warm),
                max(0, plan.total_steps - warm),
                MOST_MOMENTUM,
                LEAST_MOMENTUM,
                MOST_MOMENTUM,
            )
