"""The loop: epochs of steps, then an exact evaluation, then a record. The same on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from time import perf_counter, process_time
from typing import Any

import torch
from torch import nn

from lockstep.data.batches import Batches, sample_order
from lockstep.measure.memory import MemoryMeter
from lockstep.measure.recorder import Recorder
from lockstep.models import layers
from lockstep.parallel.group import gather, reduce_max, reduce_sum
from lockstep.parallel.ranks import Rank
from lockstep.parallel.strategies import Strategy
from lockstep.run import Run, Spec, append_line
from lockstep.training.checkpoint import Position
from lockstep.training.evaluate import Evaluation, evaluate
from lockstep.training.precision import Precision
from lockstep.training.state import digest, whole_state
from lockstep.training.step import Stepper
from lockstep.training.stopping import Stopping

# With a time limit, ranks ask each other every so many steps whether it is over: the decision must be collective.
VOTE_EVERY_STEPS = 20

Keep = Callable[[Position, Stopping, dict[str, Any], bool], None]


@dataclass
class Totals:
    """Seconds of the whole run by what they were spent on; each is the maximum over ranks, CPU time the sum."""

    train_seconds: float = 0.0
    train_cpu_seconds: float = 0.0
    eval_seconds: float = 0.0
    logging_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    train_images: float = 0


@dataclass
class Sums:
    """What an epoch has come to so far, over all ranks; `seconds` is the slowest rank's."""

    loss: float = 0.0
    correct: float = 0.0
    samples: float = 0.0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    logging_seconds: float = 0.0

    def plus(self, other: Sums) -> Sums:
        mine, theirs = asdict(self), asdict(other)
        return Sums(**{key: mine[key] + theirs[key] for key in mine})


class Span:
    """One rank's part of an epoch, from a moment on; `close` is collective and gives the sums over all ranks."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._first_row = recorder, recorder.log.count
        self._logged = recorder.logging_seconds
        self._begin, self._cpu = perf_counter(), process_time()

    def close(self) -> tuple[Sums, dict[str, float]]:
        recorder = self._recorder
        recorder.clock.settle()
        logging = recorder.logging_seconds - self._logged
        seconds, cpu = perf_counter() - self._begin - logging, process_time() - self._cpu
        loss, correct, samples = recorder.log.totals(self._first_row)
        mine = {"steps": recorder.log.count - self._first_row, "samples": samples, "loss": loss, "correct": correct}
        loss, hits, counted, cpu = reduce_sum([loss, float(correct), float(samples), cpu])
        slowest, logging = reduce_max([seconds, logging])
        return Sums(loss, hits, counted, slowest, cpu, logging), {**mine, "seconds": seconds}


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
    ) -> None:
        """`position`: where an earlier process had come to; `keep` is called, on all ranks, to write a checkpoint."""
        self._run, self._spec, self._rank, self._model = run, spec, rank, model
        self._strategy, self._stepper, self._train, self._test = strategy, stepper, train, test
        self._recorder, self._precision, self._stopping, self._keep = recorder, precision, stopping, keep
        self._position = position or Position()
        self._steps, self._epochs = self._position.steps, self._position.epoch
        self._totals = Totals(**self._position.totals)
        self._carried = Sums(**self._position.partial)
        self._started = time.time()
        self._stopped: str | None = self._stopping.reason()

    def fit(self) -> dict[str, Any]:
        """All epochs; returns the summary."""
        memory = MemoryMeter(next(self._model.parameters()).device)
        begin = perf_counter()
        while self._stopped is None and self._steps < self._spec.plan.total_steps:
            self._epoch(self._epochs + 1)
        self._back_to_best()
        self._settle()
        return self._summary(memory, perf_counter() - begin)

    def _epoch(self, epoch: int) -> None:
        sums, mine = self._steps_of(epoch)
        samples = int(sums.samples)
        begin = perf_counter()
        test = self._evaluate()
        eval_seconds = perf_counter() - begin
        self._recorder.aside("evaluation", begin)
        logged = self._recorder.logging_seconds
        self._recorder.epoch(
            _rank_record(epoch, self._rank.rank, mine, eval_seconds),
            {"test/loss": test.loss, "test/accuracy": test.accuracy},
        )
        eval_seconds, logging = reduce_max([eval_seconds, self._recorder.logging_seconds - logged])
        sums.logging_seconds += logging
        totals = self._totals
        totals.train_seconds += sums.seconds
        totals.train_cpu_seconds += sums.cpu_seconds
        totals.eval_seconds += eval_seconds
        totals.logging_seconds += sums.logging_seconds
        totals.train_images += samples
        self._epochs, self._carried = epoch, Sums()
        better = self._stopping.better(epoch, test)
        if better:
            self._stopping.keep(self._model)
        self._stopped = self._stopped or self._stopping.reason()
        if self._rank.is_first:
            append_line(self._run.folder / "epochs.jsonl", _epoch_record(epoch, self._steps, sums, test, eval_seconds))
        every = self._spec.options.checkpoint_every
        last = self._stopped is not None or self._steps >= self._spec.plan.total_steps
        if every and (epoch % every == 0 or last):
            self._checkpoint(
                Position(epoch, self._steps), {"test_loss": test.loss, "test_accuracy": test.accuracy}, better
            )

    def _evaluate(self) -> Evaluation:
        plan, placement = self._spec.plan, self._spec.placement
        self._settle()
        test = evaluate(self._model, self._test, plan.test_samples, placement.eval_batch, self._rank, self._precision)
        self._call("restore")
        return test

    def _settle(self) -> None:
        """Make the model the one result, the same on all ranks."""
        self._call("settle")
        layers.settle(self._model)

    def _back_to_best(self) -> None:
        weights = self._stopping.best()
        if weights is not None:
            load: Callable[[dict[str, torch.Tensor]], Any] = getattr(
                self._strategy, "load_whole", self._model.load_state_dict
            )
            load(weights)

    def _call(self, name: str) -> None:
        function = getattr(self._strategy, name, None)
        if function is not None:
            function()

    def _checkpoint(self, position: Position, about: dict[str, Any], best: bool) -> None:
        assert self._keep is not None
        begin = perf_counter()
        self._settle()
        position.totals = asdict(self._totals)
        self._keep(position, self._stopping, about, best)
        self._call("restore")
        self._recorder.aside("checkpoint", begin)
        self._totals.checkpoint_seconds += reduce_max([perf_counter() - begin])[0]

    def _steps_of(self, epoch: int) -> tuple[Sums, dict[str, float]]:
        """The steps of one epoch, up to the planned end or a collective stop; returns its sums, all and this rank's."""
        plan, recipe, every = self._spec.plan, self._spec.recipe, self._spec.options.checkpoint_steps
        self._train.visit(sample_order(recipe, epoch, plan.train_samples) if recipe.shuffle else None, epoch)
        run_step, after_step = self._stepper.run, self._recorder.after_step
        start, self._position.visited = self._position.visited, 0
        visited, span = start, Span(self._recorder)
        mine: dict[str, float] = {}
        for first in range(start, plan.train_samples, plan.global_batch):
            count = min(plan.global_batch, plan.train_samples - first)
            run_step(epoch, first, count)
            self._steps += 1
            visited += count
            after_step(epoch, self._steps, count)
            if self._steps == plan.total_steps or self._time_is_over():
                break
            if every and self._steps % every == 0 and visited < plan.train_samples:
                sums, part = span.close()
                self._carried, mine = self._carried.plus(sums), _added(mine, part)
                self._checkpoint(
                    Position(epoch - 1, self._steps, visited, partial=asdict(self._carried)), {}, best=False
                )
                span = Span(self._recorder)
        sums, part = span.close()
        sums = self._carried.plus(sums)
        assert sums.samples == visited, f"ranks trained {sums.samples:.0f} samples of {visited} in epoch {epoch}"
        return sums, _added(mine, part)

    def _time_is_over(self) -> bool:
        limit = self._spec.options.time_limit_s
        if limit is None or self._steps % VOTE_EVERY_STEPS:
            return False
        if reduce_max([float(time.time() - self._started > limit)])[0]:
            self._stopped = f"time limit of {limit:g} s"
        return self._stopped is not None

    def _summary(self, memory: MemoryMeter, wall: float) -> dict[str, Any]:
        found = digest(whole_state(self._model))
        growth = memory.growth_bytes()
        rows = gather([float(int(found[:12], 16)), -1.0 if growth is None else float(growth)])
        mine = {"rank": self._rank.rank, "memory_growth_bytes": growth, "weights_sha256": found}
        figures: Callable[[], dict[str, Any]] | None = getattr(self._strategy, "figures", None)
        self._recorder.close(mine | ({"strategy": figures()} if figures else {}))
        totals, stopping, precision = self._totals, self._spec.recipe.early_stopping, self._precision
        epochs = {record["epoch"]: record for record in self._run.epochs()} if self._rank.is_first else {}
        # Early stopping goes back to the best weights, so it is their results that count.
        result = epochs.get(self._stopping.best_epoch if stopping.patience else self._epochs, {})
        numbers = precision.watch.summary() if precision.watch else None
        if precision.scale and numbers is not None:
            numbers |= {"skipped_steps": precision.scale.skipped, "loss_scale": float(precision.scale.value)}
        return {
            "epochs": self._epochs,
            "steps": self._steps,
            "stopped_by": self._stopped,
            "best_epoch": self._stopping.best_epoch,
            **asdict(totals),
            "train_images": int(totals.train_images),
            "fit_seconds": wall,
            "images_per_second": totals.train_images / totals.train_seconds if totals.train_seconds else None,
            **{key: result.get(key) for key in ("train_loss", "train_accuracy", "test_loss", "test_accuracy")},
            "test_samples": self._spec.plan.test_samples,
            "numbers": numbers,
            "memory_growth_bytes": [None if row[1] < 0 else int(row[1]) for row in rows],
            "weights_sha256": found,
            "ranks_agree": len({row[0] for row in rows}) == 1,
        }


def _added(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {key: one.get(key, 0) + value for key, value in other.items()}


def _rank_record(epoch: int, rank: int, mine: dict[str, float], eval_seconds: float) -> dict[str, Any]:
    samples = max(1, mine["samples"])
    return {
        "epoch": epoch,
        "rank": rank,
        "steps": mine["steps"],
        "samples": mine["samples"],
        "train_loss": mine["loss"] / samples,
        "train_accuracy": mine["correct"] / samples,
        "train_seconds": mine["seconds"],
        "eval_seconds": eval_seconds,
    }


def _epoch_record(epoch: int, steps: int, sums: Sums, test: Evaluation, evaluating: float) -> dict[str, Any]:
    return {
        "epoch": epoch,
        "step": steps,
        "samples": int(sums.samples),
        "train_loss": sums.loss / sums.samples,
        "train_accuracy": sums.correct / sums.samples,
        "test_loss": test.loss,
        "test_accuracy": test.accuracy,
        "test_samples": test.samples,
        "train_seconds": sums.seconds,
        "train_cpu_seconds": sums.cpu_seconds,
        "eval_seconds": evaluating,
        "logging_seconds": sums.logging_seconds,
        "images_per_second": sums.samples / sums.seconds,
        "time": time.time(),
    }
