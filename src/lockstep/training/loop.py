"""The loop: epochs of steps, then an exact evaluation, then a record. The same on every rank."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lockstep.data.batches import Batches, sample_order
from lockstep.measure.memory import MemoryMeter
from lockstep.measure.recorder import Recorder
from lockstep.models import layers
from lockstep.parallel.group import gather, reduce_max
from lockstep.parallel.ranks import Rank
from lockstep.parallel.strategies import Strategy
from lockstep.run import Run, Spec, append_line
from lockstep.training.checkpoint import Position
from lockstep.training.evaluate import Evaluation, evaluate
from lockstep.training.precision import Precision
from lockstep.training.state import digest, whole_state
from lockstep.training.step import Stepper
from lockstep.training.stopping import Stopping
from lockstep.training.sums import Span, Sums, epoch_record, not_finite_from, rank_record

if TYPE_CHECKING:  # only recipes with quantize=qat need it
    from lockstep.quantize.training import Qat

# With a time limit, ranks ask each other every so many steps whether it is over: the decision must be collective.
VOTE_EVERY_STEPS = 20

Keep = Callable[[Position, Stopping, dict[str, Any], bool], None]


class Trainer:
    """Trains one model on one rank and writes what happened."""

    def __init__(
        self,
        run: Run,
        spec: Spec,
        rank: Rank,
        model: nn.Module,
        strategy: Strategy,
        stepper: Stepper,
        train: Batches,
        test: Batches,
        recorder: Recorder,
        precision: Precision,
        stopping: Stopping,
        position: Position | None = None,
        keep: Keep | None = None,
        qat: Qat | None = None,
    ) -> None:
        """`position`: where an earlier process had come to; `keep` is called, on all ranks, to write a checkpoint; `qat` trains for int8."""
        self._run, self._spec, self._rank, self._model = run, spec, rank, model
        self._strategy, self._stepper, self._train, self._test = strategy, stepper, train, test
        self._recorder, self._precision, self._stopping, self._keep = recorder, precision, stopping, keep
        self._qat, self._int8 = qat, dict[str, float]()
        position = position or Position()
        self._step, self._sums, self._totals = position.step, position.sums, position.totals
        self._epochs = -(-self._step // spec.plan.steps_per_epoch)
        """The number of the last epoch that has a record."""
        self._finite = True
        """Whether the last epoch's losses are numbers."""
        self._started = time.time()
        self._stopped: str | None = self._stopping.reason()

    def fit(self) -> dict[str, Any]:
        """All epochs; returns the summary."""
        memory = MemoryMeter(next(self._model.parameters()).device)
        begin = perf_counter()
        while self._stopped is None and self._step < self._spec.plan.total_steps:
            self._epoch()
        self._totals.add(self._sums)  # of an epoch that was cut before, where no step was left to take
        epoch = self._back_to_best()
        self._settle()
        return self._summary(epoch, memory, perf_counter() - begin)

    def _epoch(self) -> None:
        """One epoch, or what is left of it, up to its end or to where the run stops."""
        plan = self._spec.plan
        before, offset = divmod(self._step, plan.steps_per_epoch)
        epoch = before + 1
        mine = self._steps_of(epoch, offset)
        sums, whole = self._sums, self._step % plan.steps_per_epoch == 0
        if not whole:  # before the evaluation, which a run that was not stopped here would not make
            self._checkpoint(at_end=True)
        begin = perf_counter()
        test = self._evaluate(epoch)
        eval_seconds = perf_counter() - begin
        self._recorder.aside("evaluation", begin)
        logged = self._recorder.logging_seconds
        self._recorder.epoch(
            rank_record(epoch, self._rank.rank, mine, eval_seconds, plan.steps_per_epoch),
            {"test/loss": test.loss, "test/accuracy": test.accuracy},
        )
        eval_seconds, logging = reduce_max([eval_seconds, self._recorder.logging_seconds - logged])
        sums.logging_seconds += logging
        self._finite = math.isfinite(sums.loss) and math.isfinite(test.loss)
        self._totals.eval_seconds += eval_seconds
        self._totals.add(sums)
        self._epochs, self._sums = epoch, Sums()
        better = self._stopping.better(epoch, test)
        if better:
            self._stopping.keep(self._model)
        if self._rank.is_first:
            record = epoch_record(epoch, self._step, sums, test, eval_seconds, plan.train_samples) | self._int8
            append_line(self._run.folder / "epochs.jsonl", record)
        if whole:
            self._stopped = self._stopped or self._stopping.reason()
            last = self._stopped is not None or self._step >= plan.total_steps
            about = {"test_loss": test.loss, "test_accuracy": test.accuracy}
            self._checkpoint(epoch, last, about, better)

    def _evaluate(self, epoch: int) -> Evaluation:
        samples, batch = self._spec.plan.test_samples, self._spec.placement.eval_batch
        witness = self._stepper.witness
        if witness:
            witness.before_evaluation(epoch, self._test)
        self._settle()
        saw = witness.saw_test if witness else None
        test = evaluate(self._model, self._test, samples, batch, self._rank, self._precision, saw)
        if witness:
            witness.evaluated(test)
        if self._qat:
            self._int8 = self._qat.after_epoch(
                lambda int8: evaluate(int8, self._test, samples, batch, self._rank, self._precision)
            )
        self._call("restore")
        return test

    def _settle(self) -> None:
        """Make the model the one result, the same on all ranks."""
        self._call("settle")
        layers.settle(self._model)

    def _back_to_best(self) -> int:
        """Early stopping's best weights, if they are not the last ones; returns the epoch whose weights the model has."""
        weights = self._stopping.best()
        if weights is None:
            return self._epochs
        load: Callable[[dict[str, torch.Tensor]], Any] = getattr(
            self._strategy, "load_whole", self._model.load_state_dict
        )
        load(weights)
        return self._stopping.best_epoch

    def _call(self, name: str) -> None:
        function = getattr(self._strategy, name, None)
        if function is not None:
            function()

    def _checkpoint(
        self, epoch: int = 0, at_end: bool = False, about: dict[str, Any] | None = None, best: bool = False
    ) -> None:
        """Keep one where it is due: after `epoch`, after this step, or because the run ends here."""
        options = self._spec.options
        if self._keep is None:
            return
        after_epoch = bool(epoch and options.checkpoint_every and epoch % options.checkpoint_every == 0)
        after_step = bool(options.checkpoint_steps and self._step % options.checkpoint_steps == 0)
        if not (after_epoch or after_step or at_end):
            return
        begin = perf_counter()
        self._keep(Position(step=self._step, sums=self._sums, totals=self._totals), self._stopping, about or {}, best)
        self._recorder.aside("checkpoint", begin)
        self._totals.checkpoint_seconds += reduce_max([perf_counter() - begin])[0]

    def _steps_of(self, epoch: int, offset: int) -> dict[str, float]:
        """The steps of one epoch from `offset` on, up to its end or a collective stop; returns this rank's own sums."""
        plan, recipe, every = self._spec.plan, self._spec.recipe, self._spec.options.checkpoint_steps
        self._train.visit(sample_order(recipe, epoch, plan.train_samples) if recipe.shuffle else None, epoch)
        run_step, after_step = self._stepper.run, self._recorder.after_step
        span, mine, visited = Span(self._recorder), dict[str, float](), self._sums.samples
        for first in range(offset * plan.global_batch, plan.train_samples, plan.global_batch):
            count = min(plan.global_batch, plan.train_samples - first)
            run_step(epoch, first, count)
            self._step += 1
            if self._qat:
                self._qat.after_step(self._step)
            visited += count
            after_step(epoch, self._step, count)
            if self._step == plan.total_steps or self._time_is_over():
                break
            if every and self._step % every == 0 and self._step % plan.steps_per_epoch:
                self._add(span, mine, epoch, visited)
                self._checkpoint()
                span = Span(self._recorder)
        self._add(span, mine, epoch, visited)
        return mine

    def _add(self, span: Span, mine: dict[str, float], epoch: int, visited: float) -> None:
        """Take over what the steps since the last checkpoint came to. Collective."""
        sums, part = span.close()
        self._sums = self._sums.plus(sums)
        mine |= {key: mine.get(key, 0) + value for key, value in part.items()}
        trained = self._sums.samples
        assert trained == visited, f"ranks trained {trained:.0f} samples of {visited:.0f} in epoch {epoch}"

    def _time_is_over(self) -> bool:
        limit = self._spec.options.time_limit_s
        if limit is None or self._step % VOTE_EVERY_STEPS:
            return False
        if reduce_max([float(time.time() - self._started > limit)])[0]:
            self._stopped = f"time limit of {limit:g} s"
        return self._stopped is not None

    def _summary(self, epoch: int, memory: MemoryMeter, wall: float) -> dict[str, Any]:
        """The totals, and the results of the epoch whose weights the model has."""
        found = digest(whole_state(self._model))
        growth = memory.growth_bytes()
        lost = None if self._finite else not_finite_from(self._recorder.log)
        rows = gather([float(int(found[:12], 16)), -1.0 if growth is None else float(growth)])
        mine = {"rank": self._rank.rank, "memory_growth_bytes": growth, "weights_sha256": found}
        figures: Callable[[], dict[str, Any]] | None = getattr(self._strategy, "figures", None)
        self._recorder.close(mine | ({"strategy": figures()} if figures else {}))
        totals, precision = self._totals, self._precision
        epochs = {record["epoch"]: record for record in self._run.epochs()} if self._rank.is_first else {}
        result = epochs.get(epoch, {})
        numbers = precision.watch.summary() if precision.watch else None
        if precision.scale and numbers is not None:
            numbers |= {"skipped_steps": precision.scale.skipped, "loss_scale": float(precision.scale.value)}
        return {
            "epochs": self._epochs,
            "steps": self._step,
            "stopped_by": self._stopped,
            "not_finite": lost,
            "best_epoch": self._stopping.best_epoch,
            **asdict(totals),
            "train_images": int(totals.train_images),
            "fit_seconds": wall,
            "images_per_second": totals.train_images / totals.train_seconds if totals.train_seconds else None,
            **{key: result.get(key) for key in ("train_loss", "train_accuracy", "test_loss", "test_accuracy")},
            **{key: result[key] for key in ("int8_loss", "int8_accuracy") if key in result},
            "test_samples": self._spec.plan.test_samples,
            "numbers": numbers,
            "memory_growth_bytes": [None if row[1] < 0 else int(row[1]) for row in rows],
            "weights_sha256": found,
            "ranks_agree": len({row[0] for row in rows}) == 1,
        }
