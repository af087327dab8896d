"""What one rank writes while it trains: step rows, heartbeats, epochs, TensorBoard events."""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import perf_counter, perf_counter_ns
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from lockstep.errors import InputError
from lockstep.measure import callsite
from lockstep.measure.clock import CpuClock, CudaClock, StepClock
from lockstep.measure.events import EventFile
from lockstep.measure.records import StepLog
from lockstep.run import Run, Spec, append_line, folder_error, write_atomic

if TYPE_CHECKING:
    import torch

    from lockstep.measure.trace import Trace

T = TypeVar("T")
BEAT_S = 0.5
# Of ranks that are parked most of the time: their heartbeats would take time from the one whose turn it is.
PARKED_BEAT_S = 5.0
# A rank that has taken no step in this time says where it is, and a step is slow if it takes longer than the slowest of the last COMPARED_STEPS.
STILL_S = 1.5
COMPARED_STEPS = 200
# Initial room for rows, if the number of steps is not known.
FIRST_ROWS = 4096
EVENT_EVERY_STEPS = 100
End = tuple[int, int]
"""Samples so far, and the nanosecond, when a step ended."""
NOTHING: End = (0, 0)


class Extra(Protocol):
    """Records a few steps in detail: a trace or a profile."""

    def after_step(self, rows: int) -> None:
        """N step rows are written."""

    def aside(self, name: str, begin: float) -> None:
        """Something other than a step ran since `begin`, a time of `perf_counter`."""

    def close(self) -> None:
        """No more steps will come."""


class Recorder:
    """Owns the rank's files and its clocks. Time that the training thread spends here is counted separately, as logging."""

    clock: StepClock

    def __init__(
        self,
        run: Run,
        rank: int,
        total_steps: int | None,
        device: torch.device,
        rows_kept: int = 0,
        steps_before: int = 0,
        spec: Spec | None = None,
    ) -> None:
        """`total_steps`: None if unknown; then the file of rows grows. `spec`: what else to keep, a trace or a profile."""
        self.folder = run.rank_folder(rank)
        self.rank, self._device = rank, device
        self._room = FIRST_ROWS if total_steps is None else None
        rows = FIRST_ROWS if total_steps is None else total_steps - steps_before
        self._open_log(rows, rows_kept, steps_before)
        self.events = self._try(lambda: EventFile(run.folder / "tensorboard" / f"rank{rank:04d}"))
        self.trace: Trace | None = None
        self._extras: list[Extra] = []
        if spec is not None:
            self._look_closer(spec, device, rows_kept, steps_before)
        self.logging_seconds = 0.0
        self._flush_at_ns = 0
        self._events_upto = rows_kept
        self._before = steps_before
        self._where = (
            0,
            steps_before + rows_kept,
            NOTHING,
            NOTHING,
        )  # epoch, step, the end of it, of the epoch's first one
        self._beat_s = PARKED_BEAT_S if spec is not None and spec.options.turns else BEAT_S
        self.alone = ""
        """What this rank does for as long as it takes, where the stack does not show it: an evaluation in a loop of the user's own."""
        self._thread = threading.get_ident()
        self._ended = threading.Event()
        self._pulse = threading.Thread(target=self._beat_until_ended, name="lockstep-pulse", daemon=True)
        self._pulse.start()

    def _look_closer(self, spec: Spec, device: torch.device, rows: int, steps_before: int) -> None:
        """Imported only if requested, so that other runs do not wait for it."""
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

    def _open_log(self, rows: int, rows_kept: int, steps_before: int) -> None:
        path = self.folder / "steps.bin"
        self.log = self._try(lambda: StepLog(path, rows, self._device, rows_kept, steps_before))
        self.clock = CudaClock(self.log) if self._device.type == "cuda" else CpuClock(self.log)

    def _try(self, write: Callable[[], T]) -> T:
        try:
            return write()
        except OSError as error:
            raise folder_error(self.folder.parents[1], error) from None

    def aside(self, name: str, begin: float) -> None:
        """Record what ran between steps, since a time of `perf_counter`."""
        for extra in self._extras:
            extra.aside(name, begin)

    def after_step(self, epoch: int, step: int, samples: int) -> None:
        """Called after every step; about twice a second it reads pending values from a GPU."""
        now = perf_counter_ns()
        before, _, last, first = self._where
        end = (last[0] + samples, now)
        self._where = (epoch, step, end, first if epoch == before else end)
        if step == self._room:
            self._grow(step)
            now = perf_counter_ns()
        if self._extras:
            for extra in self._extras:
                self._try(partial(extra.after_step, self.log.count))
            self.logging_seconds += (perf_counter_ns() - now) / 1e9
            now = perf_counter_ns()
        if now < self._flush_at_ns:
            return
        self._flush_at_ns = now + int(BEAT_S * 1e9)
        self.clock.flush()
        self.logging_seconds += (perf_counter_ns() - now) / 1e9

    def _grow(self, rows: int) -> None:
        """Map the file of rows again with twice the room; the rows so far stay."""
        began = perf_counter()
        self.clock.flush()
        self._room = 2 * rows
        self._open_log(self._room, rows, self._before)
        self.logging_seconds += perf_counter() - began

    def _beat_until_ended(self) -> None:
        """Heartbeats from a separate thread: a rank that hangs still reports where, and one that is stopped reports nothing."""
        pace, still = Pace(), (-1, 0.0)
        pause = 0.0  # the first one at once, so that a rank's process can be found
        while not self._ended.wait(pause):
            pause = self._beat_s
            epoch, step, end, first = self._where
            more: dict[str, Any] = {"waits": self.clock.waits()}
            if epoch:
                more |= {"epoch": epoch, "step": step, "loss": self.log.mean_loss(last=50)}
                if rate := pace.look(end, first):
                    more["images_per_second"] = rate
            if step != still[0]:
                still = step, time.monotonic()
            elif time.monotonic() - still[1] > STILL_S:
                with suppress(
                    Exception
                ):  # it looks at what another thread is changing, and must not end the signs of life
                    more["site"] = self._site()
                more["slowest_s"] = self.log.slowest(COMPARED_STEPS)
            with suppress(OSError):  # a full disk must not end a thread that only reports
                self.beat("running", **more)

    def _site(self) -> dict[str, Any]:
        """Where the training thread is, which has not ended its step for a while."""
        from lockstep.torch_private import collectives_begun

        site = callsite.call_site(callsite.of_thread(self._thread)) | {"calls": collectives_begun()}
        if self.alone:
            site["alone"] = self.alone
        if self.clock.waits():
            site.setdefault("collective", "exchange of gradients")
        return site

    def beat(self, state: str, **more: Any) -> None:
        """A heartbeat: replaced in place, not forced to disk (a lost one costs nothing)."""
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
        self.clock.flush()
        append_line(self.folder / "epochs.jsonl", record)
        while self._events_upto + EVENT_EVERY_STEPS <= self.log.count:
            upto = self._events_upto + EVENT_EVERY_STEPS
            loss, correct, samples = self.log.totals(self._events_upto, upto)
            if samples:
                hits = {} if record.get("train_accuracy") is None else {"train/accuracy": correct / samples}
                self.events.scalars(self._before + upto, {"train/loss": loss / samples, **hits})
            self._events_upto = upto
        self.events.scalars(self._before + self.log.count, test)
        self.logging_seconds += perf_counter() - started

    def close(self, summary: dict[str, Any]) -> None:
        self._stop()
        write_atomic(self.folder / "summary.json", summary)
        self.beat("done", step=self._before + self.log.count)

    def leave(self) -> None:
        """Before the end of the run, which goes on in another process."""
        self._stop()
        self.beat("left", step=self._before + self.log.count)

    def _stop(self) -> None:
        self._ended.set()
        self._pulse.join()
        self.clock.flush()
        for extra in self._extras:
            self._try(extra.close)
        self.log.close()
        self.events.close()


class Pace:
    """Samples a second, looked at now and then: from the end of one step to the end of another, so that it holds for steps that take longer than
    from one look to the next. While a step or an evaluation is under way, it stays as it was."""

    def __init__(self) -> None:
        self._before = NOTHING
        self._rate: float | None = None

    def look(self, end: End, first: End) -> float | None:
        """`end`: of the last step, `first`: of the first one of its epoch. Before that lies an evaluation, which no step has to answer for."""
        since = max(self._before, first)
        if end > since:
            self._rate = (end[0] - since[0]) / ((end[1] - since[1]) / 1e9)
        self._before = end
        return self._rate


def write_failure(run: Run, record: dict[str, Any]) -> bool:
    """Write the rank's own account of why it ended; the supervisor decides which one is the first cause. False if it cannot be written."""
    account = {"time": time.time(), "pid": os.getpid(), "host": platform.node(), **record}
    return run.write_final(run.rank_folder(record["rank"]) / "failure.json", account)
