"""The loop: epochs of steps, then an exact evaluation, then a record. The same on every rank."""

from __future__ import annotations

import hashlib
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
from lockstep.parallel.group import gather, reduce_max, reduce_sum
from lockstep.parallel.ranks import Rank
from lockstep.run import Run, Spec, append_line
from lockstep.training.checkpoint import Position
from lockstep.training.evaluate import Evaluation, evaluate
from lockstep.training.step import Stepper

# With a time limit, ranks ask each other every so many steps whether it is over: the decision must be collective.
VOTE_EVERY_STEPS = 20


@dataclass
class Totals:
    """Seconds of the whole run by what they were spent on; each is the maximum over ranks, CPU time the sum."""

    train_seconds: float = 0.0
    train_cpu_seconds: float = 0.0
    eval_seconds: float = 0.0
    logging_seconds: float = 0.0
    train_images: float = 0


class Trainer:
    """Trains one model on one rank and writes what happened."""

    def __init__(
        self,
        run: Run,
        spec: Spec,
        rank: Rank,
        model: nn.Module,
        stepper: Stepper,
        train: Batches,
        test: Batches,
        recorder: Recorder,
        position: Position | None = None,
        keep: Callable[[Position], None] | None = None,
    ) -> None:
        """`position`: where an earlier attempt had come to; `keep` is called after every epoch to keep a new one."""
        self._run, self._spec, self._rank, self._model = run, spec, rank, model
        self._stepper, self._train, self._test, self._recorder = stepper, train, test, recorder
        self._position, self._keep = position or Position(), keep
        self._steps = self._position.steps
        self._started = time.time()
        self._totals = Totals(**self._position.totals)
        self._stopped: str | None = None

    def fit(self) -> dict[str, Any]:
        """All epochs; returns the summary."""
        memory = MemoryMeter(next(self._model.parameters()).device)
        begin = perf_counter()
        epoch = self._position.epoch
        while self._stopped is None and self._steps < self._spec.plan.total_steps:
            epoch += 1
            self._epoch(epoch)
            if self._keep and self._rank.is_first:
                self._keep(Position(epoch, self._steps, asdict(self._totals)))
        return self._summary(epoch, memory, perf_counter() - begin)

    def _epoch(self, epoch: int) -> None:
        totals, recorder = self._totals, self._recorder
        logged, first_row = recorder.logging_seconds, self._steps
        begin, cpu = perf_counter(), process_time()
        samples = self._steps_of(epoch)
        recorder.clock.settle()
        seconds = perf_counter() - begin - (recorder.logging_seconds - logged)
        cpu_seconds = process_time() - cpu
        loss, correct, own = recorder.log.totals(first_row)
        begin = perf_counter()
        test = evaluate(
            self._model, self._test, self._spec.plan.test_samples, self._spec.placement.eval_batch, self._rank
        )
        eval_seconds = perf_counter() - begin
        mine = {
            "epoch": epoch,
            "rank": self._rank.rank,
            "steps": self._steps - first_row,
            "samples": own,
            "train_loss": loss / max(1, own),
            "train_accuracy": correct / max(1, own),
            "train_seconds": seconds,
            "eval_seconds": eval_seconds,
        }
        recorder.epoch(mine, {"test/loss": test.loss, "test/accuracy": test.accuracy})
        logging_seconds = recorder.logging_seconds - logged
        loss, correct_sum, counted, cpu_seconds = reduce_sum([loss, float(correct), float(own), cpu_seconds])
        seconds, eval_seconds, logging_seconds = reduce_max([seconds, eval_seconds, logging_seconds])
        assert counted == samples, f"ranks trained {counted:.0f} samples of {samples} in epoch {epoch}"
        totals.train_seconds += seconds
        totals.train_cpu_seconds += cpu_seconds
        totals.eval_seconds += eval_seconds
        totals.logging_seconds += logging_seconds
        totals.train_images += samples
        if self._rank.is_first:
            append_line(
                self._run.folder / "epochs.jsonl",
                _epoch_record(
                    epoch,
                    self._steps,
                    samples,
                    loss / counted,
                    correct_sum / counted,
                    test,
                    seconds,
                    cpu_seconds,
                    eval_seconds,
                    logging_seconds,
                ),
            )

    def _steps_of(self, epoch: int) -> int:
        """The steps of one epoch, up to the planned end or a collective stop; returns the samples visited."""
        plan, recipe = self._spec.plan, self._spec.recipe
        self._train.visit(sample_order(recipe, epoch, plan.train_samples) if recipe.shuffle else None)
        run_step, after_step = self._stepper.run, self._recorder.after_step
        visited = 0
        for first in range(0, plan.train_samples, plan.global_batch):
            count = min(plan.global_batch, plan.train_samples - first)
            run_step(epoch, first, count)
            self._steps += 1
            visited += count
            after_step(epoch, self._steps, count)
            if self._steps == plan.total_steps or self._time_is_over():
                break
        return visited

    def _time_is_over(self) -> bool:
        limit = self._spec.options.time_limit_s
        if limit is None or self._steps % VOTE_EVERY_STEPS:
            return False
        if reduce_max([float(time.time() - self._started > limit)])[0]:
            self._stopped = f"time limit of {limit:g} s"
        return self._stopped is not None

    def _summary(self, epochs: int, memory: MemoryMeter, wall: float) -> dict[str, Any]:
        digest = weights_digest(self._model)
        growth = memory.growth_bytes()
        number = float(int(digest[:12], 16))
        rows = gather([number, -1.0 if growth is None else float(growth)])
        self._recorder.close({"rank": self._rank.rank, "memory_growth_bytes": growth, "weights_sha256": digest})
        last = self._run.epochs()[-1] if self._rank.is_first else {}
        totals = self._totals
        return {
            "epochs": epochs,
            "steps": self._steps,
            "stopped_by": self._stopped,
            **asdict(totals),
            "train_images": int(totals.train_images),
            "fit_seconds": wall,
            "images_per_second": totals.train_images / totals.train_seconds if totals.train_seconds else None,
            "train_loss": last.get("train_loss"),
            "train_accuracy": last.get("train_accuracy"),
            "test_loss": last.get("test_loss"),
            "test_accuracy": last.get("test_accuracy"),
            "test_samples": self._spec.plan.test_samples,
            "memory_growth_bytes": [None if row[1] < 0 else int(row[1]) for row in rows],
            "weights_sha256": digest,
            "ranks_agree": len({row[0] for row in rows}) == 1,
        }


def _epoch_record(
    epoch: int,
    steps: int,
    samples: int,
    loss: float,
    accuracy: float,
    test: Evaluation,
    seconds: float,
    cpu: float,
    evaluating: float,
    logging: float,
) -> dict[str, Any]:
    return {
        "epoch": epoch,
        "step": steps,
        "samples": samples,
        "train_loss": loss,
        "train_accuracy": accuracy,
        "test_loss": test.loss,
        "test_accuracy": test.accuracy,
        "test_samples": test.samples,
        "train_seconds": seconds,
        "train_cpu_seconds": cpu,
        "eval_seconds": evaluating,
        "logging_seconds": logging,
        "images_per_second": samples / seconds,
        "time": time.time(),
    }


def weights_digest(model: nn.Module) -> str:
    """One hash of all weights and buffers: equal digests mean bit-identical models."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
