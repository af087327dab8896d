"""A recipe's loop: epochs of steps, then an exact evaluation, then a record. The same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import msgspec

from lockstep.backends.group import reduce_max
from lockstep.data.batches import Batches, sample_order
from lockstep.measure.memory import bytes_of
from lockstep.training.checkpoint import Position
from lockstep.training.evaluate import Evaluation, evaluate
from lockstep.training.leaving import Leave, Votes
from lockstep.training.member import Member
from lockstep.training.recipe_step import RecipeStep, TrainState
from lockstep.training.stopping import Stopping
from lockstep.training.turns import Parted, Turns

if TYPE_CHECKING:  # only recipes with quantize=qat need it
    from lockstep.quantize.training import Qat

SaveCheckpoint = Callable[[Position, Stopping, dict[str, Any], bool], None]


@dataclass
class Loader:
    """The two sets, as batches."""

    train: Batches
    test: Batches


class Trainer:
    """Trains one model on one rank: decides when to evaluate, to keep a checkpoint and to stop. The member writes what happened."""

    def __init__(
        self,
        member: Member,
        state: TrainState,
        recipe_step: RecipeStep,
        data: Loader,
        stopping: Stopping,
        step: int = 0,
        save: SaveCheckpoint | None = None,
        qat: Qat | None = None,
        compile_seconds: float = 0.0,
    ) -> None:
        """`step`: how many were taken by earlier processes. `save` writes a checkpoint; all ranks call it. `qat` trains for int8."""
        self._member, self._context, self._progress = member, member.context, member.progress
        self._recorder = member.recorder
        self._state, self._recipe_step, self._data = state, recipe_step, data
        self._stopping, self._step, self._save, self._qat = stopping, step, save, qat
        self._int8: dict[str, float] = {}
        self._compile_seconds = compile_seconds
        self._epochs = -(-step // self._context.plan.steps_per_epoch)
        """The number of the last epoch that has a record."""
        self._votes = Votes(step, self._context.options.time_limit_s, self._context.spec.gives_way)
        self._stopped: str | None = stopping.reason()

    def fit(self) -> None:
        """All epochs, up to the results in the run folder."""
        self._member.running()
        self._progress.start()
        if self._step >= self._context.plan.total_steps:
            # Resumed where nothing was left to train: it can be resumed for longer all the same.
            self._checkpoint(at_end=True)
        while self._stopped is None and self._step < self._context.plan.total_steps:
            self._epoch()
        epoch = self._back_to_best()
        records = self._context.run.epochs() if self._member.is_first else []
        more = {
            "epochs": self._epochs,
            "stopped_by": self._stopped,
            "best_epoch": self._stopping.best_epoch,
            "numbers": self._state.precision.summary(),
            "compile_seconds": self._compile_seconds,
            "shares": self._recipe_step.plan.parts(self._context.plan.global_batch)
            if self._context.plan.shares
            else None,
        }
        result: dict[str, Any] = next((record for record in reversed(records) if record["epoch"] == epoch), {})
        self._member.close(self._step, {**result, "test_samples": self._context.plan.test_samples}, more)

    def race(self) -> None:
        """The steps of training, epoch after epoch, and an evaluation, for as long as somebody asks for them (turns.py)."""
        plan, recipe = self._context.plan, self._context.recipe
        turns = Turns(self._context, self._recorder, lambda samples: self._evaluate(1, samples), self._kept_bytes)
        with suppress(Parted):
            while True:
                epoch = self._step // plan.steps_per_epoch + 1
                self._data.train.visit(
                    sample_order(recipe, epoch, plan.train_samples) if recipe.shuffle else None, epoch
                )
                for first in range(0, plan.train_samples, plan.global_batch):
                    count = min(plan.global_batch, plan.train_samples - first)
                    turns.before_step(count)
                    self._take(epoch, first, count)

    def _kept_bytes(self) -> int:
        """Of tensors that last from step to step."""
        state = self._state
        weights = bytes_of([*state.model.parameters(), *state.model.buffers()])
        return weights + state.strategy.kept_bytes() + state.optimizer.kept_bytes()

    def _take(self, epoch: int, first: int, count: int) -> None:
        """One step, with all that goes with it."""
        self._recipe_step.run(epoch, first, count)
        self._step += 1
        if self._qat:
            self._qat.after_step(self._step)
        self._recorder.after_step(epoch, self._step, count)

    def _epoch(self) -> None:
        """One epoch, or what is left of it, up to its end or to where the run stops."""
        plan = self._context.plan
        before, offset = divmod(self._step, plan.steps_per_epoch)
        epoch = before + 1
        self._train_epoch(epoch, offset)
        whole = self._step % plan.steps_per_epoch == 0
        if not whole:  # before the evaluation, which a run that was not stopped here would not make
            self._checkpoint(at_end=True)
            self._give_way()
        begin = perf_counter()
        test = self._evaluate(epoch, plan.test_samples)
        self._recorder.aside("evaluation", begin)
        partial = self._progress.sums.samples < plan.train_samples
        self._progress.end_epoch(
            epoch,
            self._step,
            test.record(),
            perf_counter() - begin,
            plan.steps_per_epoch,
            partial,
            correct_known=self._recipe_step.counts_hits,
            more=self._int8,
        )
        self._epochs = epoch
        better = self._stopping.better(epoch, test)
        if better:
            self._stopping.keep(self._state.model)
        if whole:
            self._stopped = self._stopped or self._stopping.reason()
            over = self._stopped is not None or self._step >= plan.total_steps
            self._checkpoint(epoch, over or self._votes.asked, test.results(), better)
            if not over:
                self._give_way()

    def _give_way(self) -> None:
        """Leave the nodes to others, if they are wanted back; the checkpoint is written."""
        if self._votes.asked and self._stopped is None and self._save is not None:
            self._recorder.leave()
            raise Leave

    def _train_epoch(self, epoch: int, offset: int) -> None:
        """The steps of one epoch from `offset` on, up to its end or a collective stop."""
        plan, recipe, every = self._context.plan, self._context.recipe, self._context.options.checkpoint_steps
        self._data.train.visit(sample_order(recipe, epoch, plan.train_samples) if recipe.shuffle else None, epoch)
        progress = self._progress
        visited = progress.sums.samples
        progress.begin()
        for first in range(offset * plan.global_batch, plan.train_samples, plan.global_batch):
            count = min(plan.global_batch, plan.train_samples - first)
            self._take(epoch, first, count)
            visited += count
            if self._step == plan.total_steps or self._leaves():
                break
            if every and self._step % every == 0 and self._step % plan.steps_per_epoch:
                progress.pause()
                self._checkpoint()
                progress.begin()
        progress.pause()
        trained = progress.sums.samples
        assert trained == visited, f"ranks trained {trained:.0f} samples of {visited:.0f} in epoch {epoch}"

    def _evaluate(self, epoch: int, samples: int) -> Evaluation:
        context, state, batches = self._context, self._state, self._data.test
        batch = context.placement.eval_batch
        mine = self._recipe_step.plan.part(samples, context.rank.rank)
        witness = self._recipe_step.witness
        if witness:
            witness.before_evaluation(epoch, batches)
        self._member.consolidate()
        saw, recipe = witness.saw_test if witness else None, context.recipe
        test = evaluate(state.model, batches, samples, mine, batch, state.precision, saw, recipe, state.loss)
        if witness:
            witness.evaluated(test)
        if self._qat:
            judged = msgspec.structs.replace(recipe, metrics="accuracy")
            self._int8 = self._qat.after_epoch(
                lambda int8: evaluate(int8, batches, samples, mine, batch, state.precision, None, judged, state.loss)
            )
        state.strategy.resume_training()
        return test

    def _back_to_best(self) -> int:
        """Early stopping's best weights, if they are not the last ones; returns the epoch whose weights the model has."""
        weights = self._stopping.best()
        if weights is None:
            return self._epochs
        self._state.strategy.load_weights(weights)
        return self._stopping.best_epoch

    def _checkpoint(
        self, epoch: int = 0, at_end: bool = False, about: dict[str, Any] | None = None, best: bool = False
    ) -> None:
        """Keep one where it is due: after `epoch`, after this step, or because the run ends here."""
        options, progress = self._context.options, self._progress
        if self._save is None:
            return
        after_epoch = bool(epoch and options.checkpoint_every and epoch % options.checkpoint_every == 0)
        after_step = bool(options.checkpoint_steps and self._step % options.checkpoint_steps == 0)
        if not (after_epoch or after_step or at_end):
            return
        begin = perf_counter()
        position = Position(step=self._step, sums=progress.sums, totals=progress.totals)
        self._save(position, self._stopping, about or {}, best)
        self._recorder.aside("checkpoint", begin)
        progress.totals.checkpoint_seconds += reduce_max([perf_counter() - begin])[0]

    def _leaves(self) -> bool:
        stop = self._votes.stop(self._step)
        if self._votes.limit_is_over:
            self._stopped = f"time limit of {self._context.options.time_limit_s:g} s"
        return stop
