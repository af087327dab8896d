"""One optimizer step on one rank, timed phase by phase.

The loss is the sum over samples divided by the *global* count, also in the last, partial batch and in a partial
accumulation window. So the gradient does not depend on how the batch was divided.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lockstep.data.batches import Batches
from lockstep.measure.clock import DATA, EXCHANGE, FORWARD, OPTIMIZER, StepClock
from lockstep.measure.records import StepLog
from lockstep.models import layers
from lockstep.parallel.ranks import Rank
from lockstep.parallel.strategies import Strategy
from lockstep.placement import Plan, micro_shares
from lockstep.recipe import Recipe
from lockstep.training.loss import Loss, penalize
from lockstep.training.optimizers import Optimizer, clip, make_dense
from lockstep.training.precision import Precision
from lockstep.training.schedule import Pace

if TYPE_CHECKING:  # only `lockstep verify` needs it
    from lockstep.training.witness import Witness


class Stepper:
    """Forward, backward, exchange, update; holds what does not change from step to step."""

    def __init__(
        self,
        recipe: Recipe,
        strategy: Strategy,
        optimizer: Optimizer,
        batches: Batches,
        plan: Plan,
        rank: Rank,
        clock: StepClock,
        log: StepLog,
        precision: Precision,
        steps_before: int = 0,
    ) -> None:
        """`steps_before`: how many steps of the run were taken before this process came to it."""
        self._strategy, self._optimizer, self._batches = strategy, optimizer, batches
        self._plan, self._rank, self._clock, self._log = plan, rank, clock, log
        self._precision, self._pace = precision, Pace(recipe, plan, optimizer)
        self._loss, self._regularize = Loss(recipe), recipe.regularize
        self._penalized = recipe.regularize.l1 > 0 or recipe.regularize.l2 > 0
        self._clip_norm = recipe.optimizer.clip_norm
        # What a plain recipe does not ask for costs it nothing.
        self._plain = not (self._penalized or self._clip_norm or precision.scale or precision.watch)
        self._after_step = getattr(strategy, "after_step", None)
        # An optimizer that is divided over the ranks (ZeRO) sends what it has updated to the others.
        self._send_weights: Callable[[], None] | None = getattr(optimizer, "exchange", None)
        self._parameters = optimizer.parameters
        # Layers that exchange in forward (synchronised batch norm) need all ranks to make the same number of passes.
        self._in_step = rank.world > 1 and layers.synchronises(strategy.model)
        self._full_shares = self._shares(plan.global_batch)
        self._weight = torch.zeros((), device=self._parameters[0].device)
        self._weighs: tuple[int, float] = (0, 0.0)
        self._row, self._taken = log.count, steps_before
        self._ready = LastGradient(self._parameters, clock) if rank.world > 1 else None
        self.witness: Witness | None = None
        """Who writes the steps down (`lockstep verify`)."""

    def run(self, epoch: int, first: int, count: int) -> None:
        """The step on the global batch of `count` samples that starts at position `first` of the epoch's order."""
        clock, witness = self._clock, self.witness
        if witness:
            witness.before(self._taken)
        clock.start()
        self._pace.set(self._taken)
        samples = self._gradients(first, count)
        if witness:
            witness.exchanged(self._clip_norm, self._regularize)
        if self._plain:
            self._take_step()
        else:
            self._update()
        self._drop_gradients()
        self._taken += 1
        clock.lap(OPTIMIZER)
        if self._after_step is not None:
            self._after_step(self._taken)
            clock.lap(EXCHANGE)
        clock.finish(epoch, samples)
        self._row += 1
        if self._ready:
            self._ready.narrow()
        if witness:
            witness.after()

    def _update(self) -> None:
        """The optimizer's step, with all that a recipe may want between the gradients and it."""
        make_dense(self._parameters)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        watch, scale = self._precision.watch, self._precision.scale
        looking = watch is not None and watch.due(self._taken)
        if looking and watch:
            watch.before(self._parameters, gradients)
        if scale is not None and not scale.unscale(gradients):
            return
        if self._penalized:
            penalize(self._parameters, self._regularize)
        if self._clip_norm is not None:
            clip(gradients, self._clip_norm, getattr(self._strategy, "whole_norm", None))
        self._take_step()
        if looking and watch:
            watch.after(self._parameters, [p.grad for p in self._parameters])

    def _take_step(self) -> None:
        self._optimizer.step()
        if self._send_weights is not None:
            self._clock.lap(OPTIMIZER)
            self._send_weights()
            self._clock.lap(EXCHANGE)

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _gradients(self, first: int, count: int) -> int:
        shares = self._full_shares if count == self._plan.global_batch else self._shares(count)
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

    def _shares(self, count: int) -> list[tuple[int, int]]:
        """This rank's micro batches within a global batch, with empty ones at the end where others have more of them."""
        mine = list(micro_shares(count, self._rank.rank, self._plan))
        if self._in_step:
            most = max(len(list(micro_shares(count, rank, self._plan))) for rank in range(self._plan.ranks))
            mine += [(mine[-1][1], mine[-1][1])] * (most - len(mine))
        return mine

    def _micro_step(self, first: int, low: int, high: int, count: int, position: int, exchanged: bool) -> None:
        clock, log, row, precision = self._clock, self._log, self._row, self._precision
        empty = low == high
        # A rank without samples (a short last batch) computes one with weight zero, so that it can take part.
        start, stop = (first, first + 1) if empty else (first + low, first + high)
        batch = self._batches.train_batch(start, stop)
        clock.lap(DATA)
        if self.witness:
            self.witness.saw(batch, 0 if empty else high - low, count)
        layers.bind(batch.keys, 0 if empty else high - low)
        with precision.context():
            scores = precision.scores(self._strategy.model(precision.images(batch.images)))
            loss = self._loss(scores, batch)
        clock.lap(FORWARD)
        # Not loss.backward(weight), which imports the symbolic shapes of the compiler (0.5 s) to compare two shapes.
        (loss * self._weight_for(0 if empty else count)).backward()  # type: ignore[no-untyped-call]
        clock.lap_backward(exchanged)
        if empty:
            return
        loss_sum, correct = loss.detach(), (scores.detach().argmax(1) == batch.labels).sum()
        if position == 0:
            log.loss[row], log.correct[row] = loss_sum, correct
        else:
            log.loss[row] += loss_sum
            log.correct[row] += correct
        clock.skip()

    def _weight_for(self, count: int) -> torch.Tensor:
        """What each sample's loss counts: 1 / global count, times what the strategy divides by, times fp16's loss scale."""
        weighs = (count, self._strategy.gradient_scale)
        if weighs != self._weighs:
            self._weighs = weighs
            self._weight.fill_(self._strategy.gradient_scale / count if count else 0.0)
        return self._weight if self._precision.scale is None else self._weight * self._precision.scale.value


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
