"""The timeline of a few steps of one rank: marks while they run, a Chrome trace when they are over (docs/timeline.md).

A mark is a name with begin and end in nanoseconds of `perf_counter_ns`, appended to a list: well under a microsecond. The file is
renamed into place when it is complete, so a reader finds all of it or nothing.
"""

from __future__ import annotations

import platform
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

import msgspec

from lockstep.files import write_atomically
from lockstep.measure.clock import BACKWARD, EXCHANGE, CpuClock
from lockstep.measure.records import PHASES, WARMUP_STEPS, StepLog
from lockstep.run import Spec

FILE = "trace.json"
FORMAT = 1
# Tracks of a rank: its own thread first, then one per bucket.
THREAD, FIRST_BUCKET = 0, 1


class Mark(NamedTuple):
    name: str
    step: int
    begin: int
    end: int
    more: dict[str, Any] | None = None


class Trace:
    """The marks of one rank, for N steps after warm-up."""

    def __init__(self, folder: Path, spec: Spec, rank: int, rows: int, steps_before: int) -> None:
        """`rows`: how many step rows there are already; `steps_before`: steps that another run took before the first row."""
        self.active = False
        """Whether the current step is traced."""
        self.only_bucket = 0
        """The bytes of the only bucket, if all gradients are in one: then its exchange is the clock's exchange."""
        self._path, self._spec, self._rank = folder / FILE, spec, rank
        self._first = rows + WARMUP_STEPS
        self._end = self._first + (spec.options.trace or 0)
        self._before, self._step = steps_before, 0
        self._marks: list[Mark] = []
        self._written = False

    def step_begins(self, row: int) -> None:
        self.active = self._first <= row < self._end
        self._step = self._before + row + 1

    def note(self, name: str, begin: int, end: int) -> None:
        self._marks.append(Mark(name, self._step, begin, end))

    def bucket(self, index: int, size: int, begin: int, launched: int, end: int) -> None:
        """The exchange of one bucket. Any thread may call it: appending is atomic."""
        self._marks.append(Mark("bucket", self._step, begin, end, {"bucket": index, "bytes": size}))
        self._marks.append(Mark("launch", self._step, begin, launched, {"bucket": index}))

    def step_ends(self, epoch: int, samples: int, begin: int, end: int) -> None:
        self._marks.append(Mark("step", self._step, begin, end, {"epoch": epoch, "samples": samples}))
        self.active = False

    def aside(self, name: str, begin: float) -> None:
        """A span between traced steps: evaluation, checkpoint. `begin` is a time of `perf_counter`."""
        if self._marks and not self._written:
            self._marks.append(Mark(name, self._step, round(begin * 1e9), perf_counter_ns()))

    def after_step(self, rows: int) -> None:
        if rows == self._end:
            self._write()

    def close(self) -> None:
        """Called at the end: a run that ended early writes what it has."""
        if self._marks:
            self._write()

    def _write(self) -> None:
        marks, self._marks = self._marks, []
        self._written = True
        content = msgspec.json.encode(document(marks, self._spec, self._rank))
        write_atomically(self._path, content, durable=False)


class TraceClock(CpuClock):
    """Times like CpuClock, and records begin and end of every lap in the traced steps."""

    def __init__(self, log: StepLog, trace: Trace) -> None:
        super().__init__(log)
        self._trace = trace

    def start(self) -> None:
        super().start()
        self._trace.step_begins(self._log.count)

    def lap(self, phase: int) -> None:
        before = self._last
        super().lap(phase)
        if self._trace.active:
            self._trace.note(PHASES[phase], before, self._last)

    def skip(self) -> None:
        before = self._last
        super().skip()
        if self._trace.active:
            self._trace.note("other", before, self._last)

    def lap_backward(self, exchanged: bool) -> None:
        before = self._last
        super().lap_backward(exchanged)
        if not self._trace.active:
            return
        ready = self._ready if exchanged and self._ready > before else self._last
        self._trace.note(PHASES[BACKWARD], before, ready)
        if ready < self._last:
            self._trace.note(PHASES[EXCHANGE], ready, self._last)
            if self._trace.only_bucket:
                self._trace.bucket(0, self._trace.only_bucket, ready, ready, self._last)

    def finish(self, epoch: int, samples: int) -> None:
        if self._trace.active:
            self._trace.step_ends(epoch, samples, self._begin, perf_counter_ns())
        super().finish(epoch, samples)


def document(marks: list[Mark], spec: Spec, rank: int) -> dict[str, Any]:
    """A rank's marks as a Chrome trace: the rank is a process, its tracks are threads, times are microseconds."""
    buckets = sorted({mark.more["bucket"] for mark in marks if mark.name == "bucket" and mark.more})
    names = {THREAD: "steps", **{FIRST_BUCKET + index: f"bucket {index}" for index in buckets}}
    head = [_about(rank, THREAD, "process_name", name=f"rank {rank}")]
    head += [_about(rank, THREAD, "process_sort_index", sort_index=rank)]
    head += [_about(rank, track, "thread_name", name=name) for track, name in names.items()]
    head += [_about(rank, track, "thread_sort_index", sort_index=track) for track in names]
    # Longer ones first: an enclosing span comes before the spans within it.
    ordered = sorted(marks, key=lambda mark: (mark.begin, -mark.end))
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "distributedInfo": {"backend": spec.placement.backend, "rank": rank, "world_size": spec.plan.ranks},
        "lockstep": {
            "format": FORMAT,
            "run": spec.id,
            "strategy": spec.placement.strategy,
            "host": platform.node(),
            "clock": clock_identity(),
        },
        "traceEvents": head + [_event(mark, rank) for mark in ordered],
    }


def clock_identity() -> str:
    """The same for all processes that share a `perf_counter_ns` clock: those of one boot of one kernel."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


_KINDS = {"step": "step", "bucket": "exchange", "launch": "launch", "evaluation": "aside", "checkpoint": "aside"}


def _event(mark: Mark, rank: int) -> dict[str, Any]:
    more = mark.more or {}
    bucket = f"bucket {more.get('bucket')}"
    names = {"step": f"step {mark.step}", "launch": f"start {bucket}", "bucket": f"exchange {bucket}"}
    return {
        "ph": "X",
        "cat": _KINDS.get(mark.name, "phase"),
        "name": names.get(mark.name, mark.name),
        "pid": rank,
        "tid": FIRST_BUCKET + more["bucket"] if mark.name == "bucket" else THREAD,
        "ts": mark.begin / 1e3,
        "dur": (mark.end - mark.begin) / 1e3,
        "args": {"step": mark.step, **more},
    }


def _about(rank: int, track: int, kind: str, **args: Any) -> dict[str, Any]:
    """A metadata event: the name or the position of a process or thread."""
    return {"ph": "M", "name": kind, "pid": rank, "tid": track, "args": args}
