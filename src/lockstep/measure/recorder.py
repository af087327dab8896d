"""What one rank writes while it trains: step rows, signs of life, epochs, TensorBoard events."""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import perf_counter, perf_counter_ns
from typing import TYPE_CHECKING, Any, Protocol

from lockstep.errors import InputError
from lockstep.measure.clock import CpuClock, CudaClock, StepClock
from lockstep.measure.events import EventFile
from lockstep.measure.records import StepLog
from lockstep.run import Run, Spec, append_line, folder_error, write_atomic

if TYPE_CHECKING:
    import torch

    from lockstep.measure.trace import Trace

BEAT_S = 0.5
EVENT_EVERY_STEPS = 100


class Extra(Protocol):
    """What looks more closely at a few steps."""

    def after_step(self, rows: int) -> None:
        """So many step rows are written."""

    def aside(self, name: str, begin: float) -> None:
        """Something that is no step went on since a moment of `perf_counter`."""

    def close(self) -> None:
        """No more steps will come."""


class Recorder:
    """Owns the rank's files and its clocks. Time that the training thread spends here is counted apart, as logging."""

    def __init__(
        self,
        run: Run,
        rank: int,
        total_steps: int,
        device: torch.device,
        rows_kept: int = 0,
        steps_before: int = 0,
        spec: Spec | None = None,
    ) -> None:
        """`spec`: what else to keep, a trace or a profile; nothing where it is not given."""
        self.folder = run.rank_folder(rank)
        self.rank = rank
        try:
            self.log = StepLog(self.folder / "steps.bin", total_steps - steps_before, device, rows_kept, steps_before)
            self.events = EventFile(run.folder / "tensorboard" / f"rank{rank:04d}")
        except OSError as error:
            raise folder_error(run.folder, error) from None
        self.clock: StepClock = CudaClock(self.log) if device.type == "cuda" else CpuClock(self.log)
        self.trace: Trace | None = None
        self._extras: list[Extra] = []
        if spec is not None:
            self._look_closer(spec, device, rows_kept, steps_before)
        self.logging_seconds = 0.0
        self._settle_at_ns = 0
        self._events_upto = rows_kept
        self._before = steps_before
        self._where = (0, steps_before + rows_kept, 0)  # epoch, step, samples so far
        self._ended = threading.Event()
        self._pulse = threading.Thread(target=self._beat_until_ended, name="lockstep-pulse", daemon=True)
        self._pulse.start()

    def _look_closer(self, spec: Spec, device: torch.device, rows: int, steps_before: int) -> None:
        """Imported where it is asked for, so that other runs do not wait for it."""
        options = spec.options
        if options.trace:
            from lockstep.measure.trace import Trace, TraceClock

            if device.type == "cuda":
                raise InputError("--trace times a CPU's phases, and this run is on a GPU: use --profile there")
            self.trace = Trace(self.folder, spec, self.rank, rows, steps_before)
            self.clock = TraceClock(self.log, self.trace)
            self._extras.append(self.trace)
        if options.profile:
            from lockstep.measure.profile import Profile

            self._extras.append(Profile(self.folder, options.profile, rows + (options.trace or 0), steps_before))

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            raise folder_error(self.folder.parents[1], error) from None

    def aside(self, name: str, begin: float) -> None:
        """What went on between steps, since a moment of `perf_counter`."""
        for extra in self._extras:
            extra.aside(name, begin)

    def after_step(self, epoch: int, step: int, samples: int) -> None:
        """Called after every step; about twice a second it settles what a GPU still holds."""
        self._where = (epoch, step, self._where[2] + samples)
        now = perf_counter_ns()
        if self._extras:
            for extra in self._extras:
                self._try(partial(extra.after_step, self.log.count))
            self.logging_seconds += (perf_counter_ns() - now) / 1e9
            now = perf_counter_ns()
        if now < self._settle_at_ns:
            return
        self._settle_at_ns = now + int(BEAT_S * 1e9)
        self.clock.settle()
        self.logging_seconds += (perf_counter_ns() - now) / 1e9

    def _beat_until_ended(self) -> None:
        """Signs of life from a thread of its own: a rank that hangs still says where, and one that is stopped says nothing."""
        before: tuple[int, int] | None = None
        pause = 0.0  # the first at once: whoever looks for a rank's process finds it
        while not self._ended.wait(pause):
            pause = BEAT_S
            epoch, step, samples = self._where
            now = perf_counter_ns()
            more: dict[str, Any] = {"waits": self.clock.waits()}
            if epoch:
                more |= {"epoch": epoch, "step": step, "loss": self.log.mean_loss(last=50)}
            if before is not None and samples > before[0]:
                more["images_per_second"] = (samples - before[0]) / ((now - before[1]) / 1e9)
            before = (samples, now)
            with suppress(OSError):  # a full disk must not end a thread that only reports
                self.beat("running", **more)

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
                self.events.scalars(
                    self._before + upto, {"train/loss": loss / samples, "train/accuracy": correct / samples}
                )
            self._events_upto = upto
        self.events.scalars(self._before + self.log.count, test)
        self.logging_seconds += perf_counter() - started

    def close(self, summary: dict[str, Any]) -> None:
        self._ended.set()
        self._pulse.join()
        self.clock.settle()
        for extra in self._extras:
            self._try(extra.close)
        self.log.close()
        self.events.close()
        write_atomic(self.folder / "summary.json", summary)
        self.beat("done", step=self._before + self.log.count)


def write_failure(run: Run, record: dict[str, Any]) -> bool:
    """The rank's own account of why it ended; the supervisor decides which account is the first cause. False: it cannot be written."""
    account = {"time": time.time(), "pid": os.getpid(), "host": platform.node(), **record}
    return run.write_final(run.rank_folder(record["rank"]) / "failure.json", account)
