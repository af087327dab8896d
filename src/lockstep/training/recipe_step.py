"""A recipe's step: micro batches, loss, exchange, regularization, clipping, update. step.py has what is timed and exchanged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from lockstep.backends.ranks import Rank
from lockstep.data.batches import Batches
from lockstep.models import layers
from lockstep.models.calling import call
from lockstep.plan import Plan, micro_shares
from lockstep.recipe import Recipe
from lockstep.strategies import Strategy
from lockstep.strategies.optimizer import Optimizer
from lockstep.training.balance import Balance
from lockstep.training.loss import Loss, penalize
from lockstep.training.optimizers import clip, make_dense
from lockstep.training.precision import Precision
from lockstep.training.schedule import Pace
from lockstep.training.step import Records, Step, Steps

if TYPE_CHECKING:  # only `lockstep verify` needs it
    from lockstep.training.witness import Witness


@dataclass(frozen=True)
class TrainState:
    """What a step changes, and what a checkpoint keeps."""

    model: nn.Module
    strategy: Strategy
    optimizer: Optimizer
    precision: Precision
    loss: Loss


class RecipeStep:
    """Takes the steps of a recipe on one rank; holds what does not change from step to step."""

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        rank: Rank,
        state: TrainState,
        batches: Batches,
        records: Records,
        taken: int = 0,
        balance: Balance | None = None,
    ) -> None:
        """`taken`: how many steps of the run were taken before this process came to it. `balance` divides batches anew now and then."""
        self._rank, self._batches, self._records, self._balance = rank, batches, records, balance
        self.plan = plan
        """As of now."""
        self._strategy, self._optimizer, self._precision = state.strategy, state.optimizer, state.precision
        self._steps = Steps(state.strategy, records, rank.world, state.optimizer, taken)
        self._pace = Pace(recipe, plan, state.optimizer)
        self._loss, self._regularize = state.loss, recipe.regularize
        self.counts_hits = batches.one_class
        """Whether steps count how many samples were right."""
        self._penalized = recipe.regularize.l1 > 0 or recipe.regularize.l2 > 0
        self._clip_norm = recipe.optimizer.clip_norm
        # What a plain recipe does not ask for costs it nothing.
        self._plain = not (self._penalized or self._clip_norm or self._precision.scale or self._precision.watch)
        self._parameters = state.optimizer.parameters
        # Layers that exchange in forward (synchronised batch norm) need all ranks to make the same number of passes.
        self._in_step = rank.world > 1 and layers.synchronises(state.strategy.model)
        self._full_shares = self._shares(plan.global_batch)
        self.witness: Witness | None = None
        """Who writes the steps down (`lockstep verify`)."""

    def run(self, epoch: int, first: int, count: int) -> None:
        """The step on the global batch of `count` samples that starts at position `first` of the epoch's order."""
        steps, witness = self._steps, self.witness
        if witness:
            witness.before(steps.taken)
        self._records.clock.start()
        self._pace.set(steps.taken)
        shares = self._full_shares if count == self.plan.global_batch else self._shares(count)
        step = steps.open(shares[-1][1] - shares[0][0], count, units=self._batches.units(first, count))
        for low, high in shares[:-1]:
            with step.no_exchange():
                self._forward_backward(step, first, low, high)
        self._forward_backward(step, first, *shares[-1])
        if witness:
            witness.exchanged(self._clip_norm, self._regularize)
        if self._plain:
            self._optimizer.step()
        else:
            self._update()
        for parameter in self._parameters:
            parameter.grad = None
        steps.finish(epoch)
        if witness:
            witness.after()
        if self._balance and self._balance.after_step(count):
            self.plan = self._balance.plan
            self._full_shares = self._shares(count)

    def _forward_backward(self, step: Step, first: int, low: int, high: int) -> None:
        precision = self._precision
        samples = high - low
        # A rank without samples (a short last batch) computes one with weight zero, so that it can take part.
        batch = (
            self._batches.train_batch(first + low, first + high)
            if samples
            else self._batches.train_batch(first, first + 1)
        )
        step.lap("data")
        if self.witness:
            self.witness.saw(batch, samples, step.units)
        layers.bind(batch.keys, samples)
        with precision.context():
            scores = precision.scores(call(self._strategy.model, precision.images(batch.images)))
            loss = self._loss(scores, batch)
        if samples and self.counts_hits:
            step.log(correct=(scores.detach().argmax(1) == batch.labels).sum())
        step.backward(loss, precision.scale, samples=samples)

    def _update(self) -> None:
        """The optimizer's step, with all that a recipe may want between the gradients and it."""
        make_dense(self._parameters)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        watch, scale = self._precision.watch, self._precision.scale
        looking = watch is not None and watch.due(self._steps.taken)
        if looking and watch:
            watch.before(self._parameters, gradients)
        if scale is not None and not scale.unscale(gradients):
            return
        if self._penalized:
            penalize(self._parameters, self._regularize)
        if self._clip_norm is not None:
            clip(gradients, self._clip_norm, self._strategy.global_norm)
        self._optimizer.step()
        if looking and watch:
            watch.after(self._parameters, [p.grad for p in self._parameters])

    def _shares(self, count: int) -> list[tuple[int, int]]:
        """This rank's micro batches within a global batch, with empty ones at the end where others have more of them."""
        mine = list(micro_shares(count, self._rank.rank, self.plan))
        if self._in_step:
            most = max(len(list(micro_shares(count, rank, self.plan))) for rank in range(self.plan.ranks))
            mine += [(mine[-1][1], mine[-1][1])] * (most - len(mine))
        return mine
