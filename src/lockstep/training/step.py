"""One optimizer step on one rank, timed phase by phase.

The loss is the sum over samples divided by the *global* count, also in the last, partial batch and in a partial
accumulation window. So the gradient does not depend on how the batch was divided.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from lockstep.data.batches import Batches
from lockstep.measure.clock import DATA, EXCHANGE, FORWARD, OPTIMIZER, StepClock
from lockstep.measure.records import StepLog
from lockstep.parallel.ranks import Rank
from lockstep.parallel.strategies import Strategy
from lockstep.placement import Plan, micro_shares
from lockstep.training.optimizers import Optimizer


class Stepper:
    """Forward, backward, exchange, update; holds what does not change from step to step."""

    def __init__(
        self,
        strategy: Strategy,
        optimizer: Optimizer,
        batches: Batches,
        plan: Plan,
        rank: Rank,
        clock: StepClock,
        log: StepLog,
    ) -> None:
        self._strategy, self._optimizer, self._batches = strategy, optimizer, batches
        self._plan, self._rank, self._clock, self._log = plan, rank, clock, log
        self._parameters = optimizer.parameters
        self._full_shares = list(micro_shares(plan.global_batch, rank.rank, plan))
        self._weight = torch.zeros((), device=self._parameters[0].device)
        self._weight_count = 0
        self._row = log.count
        self._ready = LastGradient(self._parameters, clock) if rank.world > 1 else None

    def run(self, epoch: int, first: int, count: int) -> None:
        """The step on the global batch of `count` samples that starts at position `first` of the epoch's order."""
        clock = self._clock
        clock.start()
        samples = self._gradients(first, count)
        self._optimizer.step()
        self._drop_gradients()
        clock.lap(OPTIMIZER)
        clock.finish(epoch, samples)
        self._row += 1
        if self._ready:
            self._ready.narrow()

    def gradients_only(self, first: int, count: int) -> list[torch.Tensor]:
        """The exchanged gradients of a step that is not taken (for `lockstep verify`)."""
        self._clock.start()
        self._gradients(first, count)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for p in self._parameters]
        self._drop_gradients()
        return gradients

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _gradients(self, first: int, count: int) -> int:
        full = count == self._plan.global_batch
        shares = self._full_shares if full else list(micro_shares(count, self._rank.rank, self._plan))
        last = len(shares) - 1
        for position, (low, high) in enumerate(shares):
            if position == last:
                self._micro_step(first, low, high, count, position, exchanged=self._rank.world > 1)
            else:
                with self._strategy.no_exchange():
                    self._micro_step(first, low, high, count, position, exchanged=False)
        if self._strategy.exchange is not None:
            self._clock.gradients_ready()
            self._strategy.exchange()
            self._clock.lap(EXCHANGE)
        return shares[-1][1] - shares[0][0]

    def _micro_step(self, first: int, low: int, high: int, count: int, position: int, exchanged: bool) -> None:
        clock, log, row = self._clock, self._log, self._row
        empty = low == high
        # A rank without samples (a short last batch) computes one with weight zero, so that it can take part.
        images, labels = (
            self._batches.take(first, first + 1) if empty else self._batches.take(first + low, first + high)
        )
        clock.lap(DATA)
        scores = self._strategy.model(images)
        loss = functional.cross_entropy(scores, labels, reduction="sum")
        clock.lap(FORWARD)
        loss.backward(self._weight_for(0 if empty else count))  # type: ignore[no-untyped-call]
        clock.lap_backward(exchanged)
        if empty:
            return
        loss_sum, correct = loss.detach(), (scores.detach().argmax(1) == labels).sum()
        if position == 0:
            log.loss[row], log.correct[row] = loss_sum, correct
        else:
            log.loss[row] += loss_sum
            log.correct[row] += correct
        clock.skip()

    def _weight_for(self, count: int) -> torch.Tensor:
        """What each sample's loss counts: 1 / global count, times what the strategy divides by."""
        if count != self._weight_count:
            self._weight_count = count
            self._weight.fill_(self._strategy.gradient_scale / count if count else 0.0)
        return self._weight


class LastGradient:
    """Tells the clock when the last gradient of a backward pass is there, at the cost of one hook.

    All parameters are watched in the first step, which shows whose gradient comes last; from then on only that one.
    """

    def __init__(self, parameters: list[nn.Parameter], clock: StepClock) -> None:
        self._clock = clock
        self._latest: nn.Parameter | None = None
        self._handles: list[tuple[nn.Parameter, Any]] = [
            (p, p.register_post_accumulate_grad_hook(self._seen))  # type: ignore[no-untyped-call]
            for p in parameters
            if p.requires_grad
        ]
        self._narrowed = False

    def _seen(self, parameter: nn.Parameter) -> None:
        self._latest = parameter
        self._clock.gradients_ready()

    def narrow(self) -> None:
        if self._narrowed:
            return
        self._narrowed = True
        for parameter, handle in self._handles:
            if parameter is not self._latest:
                handle.remove()
