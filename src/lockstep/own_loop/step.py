"""One optimizer step of a user's own loop: gradients of the global batch, timed phase by phase."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from lockstep import keyed
from lockstep.errors import InputError
from lockstep.measure.clock import DATA, EXCHANGE, FORWARD, OPTIMIZER, StepClock
from lockstep.models import layers
from lockstep.own_loop.record import Book
from lockstep.own_loop.reduction import mean_over
from lockstep.own_loop.share import Batch, Shares
from lockstep.parallel.strategies import Strategy
from lockstep.training.step import LastGradient

_LAPS = {"data": DATA, "forward": FORWARD, "optimizer": OPTIMIZER}


class Stepping:
    """What does not change from step to step, and the step that is under way."""

    def __init__(self, model: nn.Module, strategy: Strategy, book: Book, device: torch.device, world: int) -> None:
        self.strategy, self.book, self.world = strategy, book, world
        self._weight, self._weighs = torch.zeros((), device=device), 0.0
        self.keyed = layers.needs_keys(model)
        self._open: Step | None = None
        self._epoch = 0
        self._after_step = getattr(strategy, "after_step", None)
        trained = [p for p in model.parameters() if p.requires_grad]
        self._unseen: list[nn.Parameter] | None = trained
        # The book passes it on to its clock of the moment.
        self._ready = LastGradient(trained, cast(StepClock, book)) if world > 1 else None

    @property
    def epoch(self) -> int:
        return self._epoch

    def begin(self, shares: Shares) -> None:
        """The loop over an epoch's batches starts: so does its clock."""
        self.finish()
        self.book.watch_optimizers()
        if shares.epoch < self._epoch or (shares.epoch == self._epoch and self.book.between_epochs):
            raise InputError(f"s.steps: epoch={shares.epoch} again: pass the number of the epoch, 1, 2, 3, …")
        self._epoch = shares.epoch
        self.book.training_begins()

    def open(self, batch: Batch, seed: int) -> Step:
        """The next step. The one before ends here, and so nothing between them is lost."""
        self.finish()
        layers.bind(keyed.sample_keys(seed, self._epoch, batch.mine) if self.keyed else None, batch.samples)
        self._open = Step(self, batch)
        return self._open

    def check_gradients(self) -> None:
        """In the first step: a strategy that keeps the gradients for itself would leave the script's optimizer without."""
        unseen, self._unseen = self._unseen, None
        if unseen is not None and all(parameter.grad is None for parameter in unseen):
            raise InputError("step.backward: no parameter of the model that s.wrap was given has a gradient after it")

    def check_loss(self, loss: torch.Tensor, batch: Batch) -> None:
        """In the first step: a mean over the rank's samples would make N ranks compute something else than one."""
        if self._unseen is None or batch.samples < 2:
            return
        mean = mean_over(loss, batch.samples)
        if mean:
            raise InputError(
                f"step.backward: the loss is a mean over this rank's samples ({mean}), and ranks have different numbers of them: "
                "give the sum (reduction='sum'); backward divides by the global count"
            )

    def weight(self, batch: Batch) -> torch.Tensor:
        """What each sample's loss counts: 1 / global count, times what the strategy divides by."""
        weighs = self.strategy.gradient_scale / batch.count if batch.samples else 0.0
        if weighs != self._weighs:
            self._weighs = weighs
            self._weight.fill_(weighs)
        return self._weight

    def finish(self) -> None:
        """End the step under way, if there is one."""
        step, self._open = self._open, None
        if step is None:
            return
        if not step.exchanged:
            raise InputError(
                "a step ended without step.backward(loss_sum): its gradients are not those of the global batch"
            )
        if self._after_step is not None:
            self._after_step(self.book.steps + 1)
        if not step.updated:
            self.book.clock.lap(OPTIMIZER)
        self.book.step_ends(self._epoch, step.batch, step.passes, step.correct_known)
        if self._ready:
            self._ready.narrow()


class Step:
    """What the body of `for step in s.steps(…)` works with."""

    def __init__(self, stepping: Stepping, batch: Batch) -> None:
        self._stepping, self._book = stepping, stepping.book
        self.batch = batch
        self.mine = batch.mine
        """Which samples of the set this rank takes."""
        self.exchanged, self.updated, self.correct_known, self.passes = False, False, False, 0
        self._inner = False

    def lap(self, phase: str) -> None:
        """What came since the last mark was `phase`: data, forward or optimizer. Backward and exchange mark themselves."""
        if phase not in _LAPS:
            raise InputError(f"step.lap('{phase}'): known are {', '.join(_LAPS)}")
        self.updated = phase == "optimizer"
        self._book.clock.lap(_LAPS[phase])

    def backward(self, loss_sum: torch.Tensor, scaler: Any = None) -> None:
        """Gradients of the mean over the whole global batch; `loss_sum` is the sum over this rank's samples.

        `scaler`: a torch.amp.GradScaler, whose scale the gradients get.
        """
        if self.exchanged:
            raise InputError(
                "step.backward: gradients were exchanged already; all calls but the last go into step.no_exchange()"
            )
        clock, strategy, batch = self._book.clock, self._stepping.strategy, self.batch
        clock.lap(FORWARD)
        self._stepping.check_loss(loss_sum, batch)
        weight = self._stepping.weight(batch)
        (loss_sum * (weight if scaler is None else scaler.scale(weight))).backward()  # type: ignore[no-untyped-call]
        clock.lap_backward(self._stepping.world > 1 and not self._inner)
        self.passes += 1
        self.exchanged = not self._inner
        if self.exchanged and strategy.exchange is not None:
            clock.gradients_ready()
            strategy.exchange()
            clock.lap(EXCHANGE)
        if self.exchanged:
            self._stepping.check_gradients()
        if batch.samples:
            self._book.add_loss(loss_sum.detach())
        clock.skip()

    @contextmanager
    def no_exchange(self) -> Iterator[None]:
        """Around forward and backward of all passes but the last, where a step takes several (gradient accumulation)."""
        self._inner = True
        try:
            with self._stepping.strategy.no_exchange():
                yield
        finally:
            self._inner = False

    def log(self, *, correct: torch.Tensor | int) -> None:
        """How many of this rank's samples were right. Nothing waits for a tensor's value."""
        clock = self._book.clock
        if not self.updated:
            clock.lap(OPTIMIZER if self.exchanged else FORWARD)
        if self.batch.samples:
            self._book.add_correct(correct)
        self.correct_known = True
        clock.skip()
