"""What an epoch and a run come to: sums over samples and ranks, and the records and the summary made of them."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from time import perf_counter, process_time
from typing import Any

from torch import nn

from lockstep.backends.group import gather, reduce_max, reduce_sum
from lockstep.machine import starving
from lockstep.machine.cpu import delayed_seconds
from lockstep.measure.memory import MemoryMeter
from lockstep.measure.recorder import Recorder
from lockstep.measure.records import StepLog
from lockstep.run import append_line
from lockstep.shapes import Spent
from lockstep.training.context import Context
from lockstep.training.state import digest, whole_state


@dataclass
class Sums:
    """What an epoch has come to so far, over all ranks; `seconds` is the slowest rank's."""

    loss: float = 0.0
    correct: float = 0.0
    samples: float = 0.0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    logging_seconds: float = 0.0
    used_seconds: float = 0.0
    waited_seconds: float = 0.0
    others_seconds: float = 0.0
    stolen_seconds: float = 0.0

    def plus(self, other: Sums) -> Sums:
        mine, theirs = asdict(self), asdict(other)
        return Sums(**{key: mine[key] + theirs[key] for key in mine})


@dataclass
class Totals:
    """Seconds of the whole run by what they were spent on; each is the maximum over ranks, CPU time the sum.

    The last four are those of `Spent` (shapes.py): the processors that the training used, and could not have.
    """

    train_seconds: float = 0.0
    train_cpu_seconds: float = 0.0
    eval_seconds: float = 0.0
    logging_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    train_images: float = 0
    used_seconds: float = 0.0
    waited_seconds: float = 0.0
    others_seconds: float = 0.0
    stolen_seconds: float = 0.0

    def add(self, sums: Sums) -> None:
        """An epoch, or a part of one, that has ended."""
        self.train_seconds += sums.seconds
        self.train_cpu_seconds += sums.cpu_seconds
        self.logging_seconds += sums.logging_seconds
        self.train_images += sums.samples
        self.used_seconds += sums.used_seconds
        self.waited_seconds += sums.waited_seconds
        self.others_seconds += sums.others_seconds
        self.stolen_seconds += sums.stolen_seconds

    @property
    def cores_had(self) -> float | None:
        """The share of its cores that the training had, of the time that its steps took."""
        return starving.had(
            Spent(
                used=self.used_seconds,
                waited=self.waited_seconds,
                others=self.others_seconds,
                stolen=self.stolen_seconds,
            )
        )


class Span:
    """One rank's part of an epoch, from a moment on."""

    def __init__(self, recorder: Recorder, first_of_host: bool) -> None:
        self._meter = starving.Meter(first_of_host)
        self._recorder, self._first_row = recorder, recorder.log.count
        self._logged = recorder.logging_seconds
        self._delayed = delayed_seconds()
        self._begin = now()

    def close(self, end: tuple[float, float] | None = None) -> tuple[Sums, dict[str, float]]:
        """The sums over all ranks, and this rank's own. Collective. `end`: when the last step ended, if that was not just now."""
        recorder = self._recorder
        recorder.clock.flush()
        logging = recorder.logging_seconds - self._logged
        wall, cpu = (after - before for after, before in zip(end or now(), self._begin, strict=True))
        delayed, spent = delayed_seconds(), self._meter.read()
        loss, correct, samples = recorder.log.totals(self._first_row)
        mine = {"steps": recorder.log.count - self._first_row, "samples": samples, "loss": loss, "correct": correct}
        processors = [spent["used"], spent["waited"], spent["others"], spent["stolen"]]
        loss, hits, counted, cpu, *processors = reduce_sum([loss, float(correct), float(samples), cpu, *processors])
        slowest, logging_of_slowest = reduce_max([wall - logging, logging])
        mine["seconds"] = wall - logging
        if delayed is not None and self._delayed is not None:
            mine["delayed"] = delayed - self._delayed
        return Sums(loss, hits, counted, slowest, cpu, logging_of_slowest, *processors), mine


def now() -> tuple[float, float]:
    """Wall and CPU seconds."""
    return perf_counter(), process_time()


class Progress:
    """How far a training is, what the epoch under way and those before it have come to, and their records."""

    def __init__(self, context: Context, recorder: Recorder, sums: Sums, totals: Totals) -> None:
        self._context, self._recorder = context, recorder
        # Emulated hosts are one machine.
        rank = context.rank
        self._first_of_host = rank.is_first if context.placement.emulated else rank.local_rank == 0
        self.sums, self.totals = sums, totals
        self.record: dict[str, Any] = {}
        """Of the last epoch that was recorded."""
        self._mine: dict[str, float] = {}
        self._span: Span | None = None
        self.start()

    def start(self) -> None:
        """Everything is ready: the training's wall time and its growth of memory count from here."""
        self._opened, self._memory = perf_counter(), MemoryMeter(self._context.device)

    def begin(self) -> None:
        """Steps follow: time counts from here."""
        self._span = Span(self._recorder, self._first_of_host)

    @property
    def paused(self) -> bool:
        """Whether no step is being timed."""
        return self._span is None

    def pause(self, end: tuple[float, float] | None = None) -> None:
        """Take over what the steps since `begin` came to. Collective."""
        if self._span is None:
            return
        sums, mine = self._span.close(end)
        self._span = None
        self.sums = self.sums.plus(sums)
        self._mine = {key: self._mine.get(key, 0) + value for key, value in mine.items()}

    def end_epoch(
        self,
        epoch: int,
        step: int,
        test: dict[str, Any],
        evaluating: float,
        steps_of_epoch: int,
        partial: bool,
        correct_known: bool = True,
        more: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Write the rank's own record and that of all ranks. Collective. A partial one is replaced when a resumed run completes the epoch.

        `test`: test_loss, test_samples and what else the model is judged by, over all ranks; a script may not tell some of it (None).
        """
        recorder, sums, mine = self._recorder, self.sums, self._mine
        samples = max(1, mine["samples"])
        own = {
            "epoch": epoch,
            "rank": self._context.rank.rank,
            "partial": mine["steps"] < steps_of_epoch,
            "steps": mine["steps"],
            "samples": mine["samples"],
            "train_loss": mine["loss"] / samples,
            "train_accuracy": mine["correct"] / samples if correct_known else None,
            "train_seconds": mine["seconds"],
            "eval_seconds": evaluating,
            "delayed_seconds": mine.get("delayed"),
            "memory_growth_bytes": self._memory.lap_bytes(),
        }
        logged = recorder.logging_seconds
        told = {
            key.removeprefix("test_"): value
            for key, value in test.items()
            if value is not None and key != "test_samples"
        }
        recorder.epoch(own, {f"test/{key}": value for key, value in told.items()})
        evaluating, logging = reduce_max([evaluating, recorder.logging_seconds - logged])
        sums.logging_seconds += logging
        self.totals.eval_seconds += evaluating
        self.totals.add(sums)
        self.record = {
            "epoch": epoch,
            "step": step,
            "partial": partial,
            "samples": int(sums.samples),
            "train_loss": sums.loss / sums.samples,
            "train_accuracy": sums.correct / sums.samples if correct_known else None,
            **test,
            "train_seconds": sums.seconds,
            "train_cpu_seconds": sums.cpu_seconds,
            "eval_seconds": evaluating,
            "logging_seconds": sums.logging_seconds,
            "images_per_second": sums.samples / sums.seconds,
            "time": time.time(),
            **(more or {}),
        }
        if self._context.rank.is_first:
            append_line(self._context.run.folder / "epochs.jsonl", self.record)
        self.sums, self._mine = Sums(), {}
        return dict(self.record)

    def close(self, model: nn.Module, steps: int, result: dict[str, Any], figures: dict[str, Any]) -> dict[str, Any]:
        """End the rank's files; returns the run's summary. Collective. `result`: the record of the epoch whose weights the model has."""
        fit_seconds = perf_counter() - self._opened
        self.totals.add(self.sums)  # of an epoch that was cut before, where no step was left to take
        weights, growth = digest(whole_state(model)), self._memory.growth_bytes()
        # The same on all ranks, since the epoch's sums are.
        losses = [self.record.get(key) for key in ("train_loss", "test_loss")]
        finite = all(loss is None or math.isfinite(loss) for loss in losses)
        lost = None if finite else not_finite_from(self._recorder.log)
        rows = gather([float(int(weights[:12], 16)), -1.0 if growth is None else float(growth)])
        own = {"rank": self._context.rank.rank, "memory_growth_bytes": growth, "weights_sha256": weights}
        self._recorder.close(own | ({"strategy": figures} if figures else {}))
        totals = self.totals
        return {
            "steps": steps,
            "not_finite": lost,
            **asdict(totals),
            "train_images": int(totals.train_images),
            "fit_seconds": fit_seconds,
            "cores_had": totals.cores_had,
            "images_per_second": totals.train_images / totals.train_seconds if totals.train_seconds else None,
            **{key: result.get(key) for key in ("train_loss", "train_accuracy", "test_loss", "test_accuracy")},
            **{key: value for key, value in result.items() if key.startswith("test_")},
            **{key: result[key] for key in ("int8_loss", "int8_accuracy") if key in result},
            "test_samples": result.get("test_samples", 0),
            "memory_growth_bytes": [None if row[1] < 0 else int(row[1]) for row in rows],
            "weights_sha256": weights,
            "ranks_agree": len({row[0] for row in rows}) == 1,
        }


def not_finite_from(log: StepLog) -> str:
    """For a run that ends with a loss that is not a number: since when. Collective."""
    log.flush()
    step = -reduce_max([-float(log.first_not_finite() or math.inf)])[0]
    return "a loss that is not finite" + (f", since step {step:.0f}" if math.isfinite(step) else "")
