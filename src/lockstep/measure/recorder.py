"""What one rank writes while it trains: step rows, signs of life, epochs, TensorBoard events."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from time import perf_counter, perf_counter_ns
from typing import TYPE_CHECKING, Any

from lockstep.measure.clock import CpuClock, CudaClock, StepClock
from lockstep.measure.events import EventFile
from lockstep.measure.records import StepLog
from lockstep.run import Run, append_line, folder_error, write_atomic

if TYPE_CHECKING:
    import torch

BEAT_NS = 500_000_000
EVENT_EVERY_STEPS = 100


class Recorder:
    """Owns the rank's files and its clocks. Time spent here is counted apart, as logging."""

    def __init__(self, run: Run, rank: int, total_steps: int, device: torch.device) -> None:
        self.folder = run.rank_folder(rank)
        self.rank = rank
        try:
            self.log = StepLog(self.folder / "steps.bin", total_steps, device)
            self.events = EventFile(run.folder / "tensorboard" / f"rank{rank:04d}")
        except OSError as error:
            raise folder_error(run.folder, error) from None
        self.clock: StepClock = CudaClock(self.log) if device.type == "cuda" else CpuClock(self.log)
        self.logging_seconds = 0.0
        self._next_beat_ns = 0
        self._events_upto = 0
        self._last_beat: tuple[int, int] | None = None
        self._samples = 0

    def after_step(self, epoch: int, step: int, samples: int) -> None:
        """Called after every step; about twice a second it writes a sign of life."""
        self._samples += samples
        now = perf_counter_ns()
        if now < self._next_beat_ns:
            return
        started = perf_counter()
        self._next_beat_ns = now + BEAT_NS
        self.clock.settle()
        rate = None  # until there are two beats to compare
        if self._last_beat is not None:
            samples_before, ns_before = self._last_beat
            rate = (self._samples - samples_before) / ((now - ns_before) / 1e9)
        self._last_beat = (self._samples, now)
        self.beat("running", epoch=epoch, step=step, loss=self.log.mean_loss(last=50), images_per_second=rate)
        self.logging_seconds += perf_counter() - started

    def beat(self, state: str, **more: Any) -> None:
        """A sign of life: replaced in place, not forced to disk (a lost one costs nothing)."""
        record = {
            "rank": self.rank,
            "state": state,
            "time": time.time(),
            "pid": os.getpid(),
            "host": platform.node(),
            **more,
        }
        write_atomic(self.folder / "status.json", record, durable=False)

    def epoch(self, record: dict[str, Any], test: dict[str, float]) -> None:
        """The rank's own epoch record, and its events: train by the step, test by the epoch."""
        started = perf_counter()
        self.clock.settle()
        append_line(self.folder / "epochs.jsonl", record)
        while self._events_upto + EVENT_EVERY_STEPS <= self.log.count:
            upto = self._events_upto + EVENT_EVERY_STEPS
            loss, correct, samples = self.log.totals(self._events_upto, upto)
            if samples:
                self.events.scalars(upto, {"train/loss": loss / samples, "train/accuracy": correct / samples})
            self._events_upto = upto
        self.events.scalars(self.log.count, test)
        self.logging_seconds += perf_counter() - started

    def close(self, summary: dict[str, Any]) -> None:
        self.clock.settle()
        self.log.close()
        self.events.close()
        write_atomic(self.folder / "summary.json", summary)
        self.beat("done", step=self.log.count)


def write_failure(folder: Path, record: dict[str, Any]) -> None:
    """The rank's own account of why it ended; the supervisor decides which account is the first cause."""
    write_atomic(folder / "failure.json", {"time": time.time(), "pid": os.getpid(), "host": platform.node(), **record})
