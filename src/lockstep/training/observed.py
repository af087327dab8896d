"""What a user's own loop turns out to be: until it has run, nobody knows its batch, its data or its learning rate."""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from lockstep.training.context import Context
from lockstep.training.step import Step


class Observed:
    """Watches a script's steps and its optimizer, and puts what it sees into run.json."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._best = (float("inf"), 0)
        self._hook: Any = None
        self._rates: dict[str, list[tuple[float, float]]] = {}
        """For each kind of optimizer, the least and the greatest learning rate of its groups, at first and now."""
        self._epoch_opens()

    def _epoch_opens(self) -> None:
        self.counts: list[int] = []
        """Samples of each global batch since the last epoch was recorded."""
        self.meant = 0
        """How many steps the script's loops over this epoch have."""
        self.all_correct = True
        """Whether the script has told the number of hits of every step."""
        self._passes = 1

    @property
    def best_epoch(self) -> int:
        return self._best[1]

    def loop_begins(self, steps: int) -> None:
        self.meant += steps
        optimizer = sys.modules.get("torch.optim.optimizer")  # not imported here: it takes a second
        if optimizer is not None and self._hook is None:
            self._hook = optimizer.register_optimizer_step_pre_hook(self._saw_optimizer)

    def step_ends(self, step: Step) -> None:
        self.counts.append(step.count)
        self._passes = max(self._passes, step.passes)
        self.all_correct &= step.correct_known or step.samples == 0

    def epoch_ends(self, record: dict[str, Any]) -> None:
        if record["test_loss"] is not None:
            self._best = min(self._best, (record["test_loss"], record["epoch"]))
        if self._context.rank.is_first:
            self._state_plan(record)
        self._epoch_opens()

    def close(self) -> None:
        if self._hook is not None:
            self._hook.remove()

    def _saw_optimizer(self, optimizer: Any, args: Any, keywords: Any) -> None:
        rates = sorted({float(group["lr"]) for group in optimizer.param_groups if "lr" in group})
        if rates:
            self._rates.setdefault(type(optimizer).__name__, []).append((rates[0], rates[-1]))
            del self._rates[type(optimizer).__name__][1:-1]  # the first and the last

    def _rate_note(self) -> str:
        """What the script trained with; where its optimizer is not torch's, only it knows."""
        if not self._rates:
            return "the learning rate is known to the script alone"
        parts = []
        for name, seen in self._rates.items():
            low, high = seen[-1]
            now = f"{high:g}" if low == high else f"{low:g} to {high:g} by the group"
            before = f"{seen[0][1]:g} at first, " if seen[0] != seen[-1] else ""
            parts.append(f"{before}{now} ({name}, set by the script)")
        return "learning rate " + "; ".join(parts)

    def _state_plan(self, record: dict[str, Any]) -> None:
        spec, counts = self._context.spec, self.counts
        batch = max(counts)
        share = -(-batch // self._context.rank.world)
        stated = msgspec.structs.replace(
            spec.plan,
            global_batch=batch,
            micro_batch=-(-share // self._passes),
            accumulation=self._passes,
            train_samples=sum(counts),
            test_samples=record["test_samples"],
            steps_per_epoch=len(counts),
            last_batch=counts[-1],
            total_steps=record["step"],
            lr=next((seen[0][1] for seen in self._rates.values()), 0.0),
            lr_note=self._rate_note(),
        )
        recipe = msgspec.structs.replace(spec.recipe, global_batch=batch, epochs=record["epoch"])
        self._context.run.write_spec(msgspec.structs.replace(spec, recipe=recipe, plan=stated))
