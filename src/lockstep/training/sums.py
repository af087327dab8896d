"""What an epoch and a run come to: sums over samples and ranks, and the records made of them."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from time import perf_counter, process_time
from typing import Any

from lockstep.measure.recorder import Recorder
from lockstep.measure.records import StepLog
from lockstep.parallel.group import reduce_max, reduce_sum
from lockstep.training.evaluate import Evaluation


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


@dataclass
class Totals:
    """Seconds of the whole run by what they were spent on; each is the maximum over ranks, CPU time the sum."""

    train_seconds: float = 0.0
    train_cpu_seconds: float = 0.0
    eval_seconds: float = 0.0
    logging_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    train_images: float = 0

    def add(self, sums: Sums) -> None:
        """An epoch, or a part of one, that has ended."""
        self.train_seconds += sums.seconds
        self.train_cpu_seconds += sums.cpu_seconds
        self.logging_seconds += sums.logging_seconds
        self.train_images += sums.samples


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


def not_finite_from(log: StepLog) -> str:
    """For a run that ends with a loss that is not a number: since when. Collective."""
    log.settle()
    step = -reduce_max([-float(log.first_not_finite() or math.inf)])[0]
    return "a loss that is not finite" + (f", since step {step:.0f}" if math.isfinite(step) else "")


def rank_record(epoch: int, rank: int, mine: dict[str, float], eval_seconds: float, whole: int) -> dict[str, Any]:
    """`whole`: how many steps an epoch has."""
    samples = max(1, mine["samples"])
    return {
        "epoch": epoch,
        "rank": rank,
        "partial": mine["steps"] < whole,
        "steps": mine["steps"],
        "samples": mine["samples"],
        "train_loss": mine["loss"] / samples,
        "train_accuracy": mine["correct"] / samples,
        "train_seconds": mine["seconds"],
        "eval_seconds": eval_seconds,
    }


def epoch_record(epoch: int, step: int, sums: Sums, test: Evaluation, evaluating: float, whole: int) -> dict[str, Any]:
    """`whole`: how many samples an epoch has. A partial record is replaced when the run goes on and completes the epoch."""
    return {
        "epoch": epoch,
        "step": step,
        "partial": sums.samples < whole,
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
