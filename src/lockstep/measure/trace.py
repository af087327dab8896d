"""The timeline of a few steps of one rank: marks while they run, a Chrome trace when they are over (docs/timeline.md).

A mark is a name with begin and end in nanoseconds of `perf_counter_ns`, appended to a list: well under a microsecond. The file is put
in its place when it is whole, so whoever reads finds all of it or nothing.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

import msgspec

from lockstep import shapes
from lockstep.measure.clock import BACKWARD, EXCHANGE, CpuClock
from lockstep.measure.records import PHASES, WARMUP_STEPS, StepLog
from lockstep.reading import Damaged, read_record
from lockstep.run import Run, Spec

FILE = "trace.json"
FORMAT = 1
# Tracks of a rank: its own thread first, then one for each bucket.
THREAD, FIRST_BUCKET = 0, 1


class Mark(NamedTuple):
    name: str
    step: int
    begin: int
    end: int
    more: dict[str, Any] | None = None


class Trace:
    """The marks of one rank, for so many steps after warm-up."""

    def __init__(self, folder: Path, spec: Spec, rank: int, rows: int, steps_before: int) -> None:
        """`rows`: how many step rows there are already; `steps_before`: steps that another run took before the first row."""
        self.active = False
        """Whether the step under way is traced."""
        self.only_bucket = 0
        """Where all gradients are in one bucket, its bytes: then its exchange is what the clock counts as exchange."""
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
        """The exchange of one bucket. Called by whatever thread ends it: appending is one operation."""
        self._marks.append(Mark("bucket", self._step, begin, end, {"bucket": index, "bytes": size}))
        self._marks.append(Mark("launch", self._step, begin, launched, {"bucket": index}))

    def step_ends(self, epoch: int, samples: int, begin: int, end: int) -> None:
        self._marks.append(Mark("step", self._step, begin, end, {"epoch": epoch, "samples": samples}))
        self.active = False

    def aside(self, name: str, begin: float) -> None:
        """What lies between traced steps and is none of them: evaluation, checkpoint. `begin` is of `perf_counter`."""
        if self._marks and not self._written:
            self._marks.append(Mark(name, self._step, round(begin * 1e9), perf_counter_ns()))

    def after_step(self, rows: int) -> None:
        if rows == self._end:
            self._write()

    def close(self) -> None:
        """A run that ended early has what there is."""
        if self._marks:
            self._write()

    def _write(self) -> None:
        marks, self._marks = self._marks, []
        self._written = True
        temporary = self._path.with_name(f".{FILE}.{os.getpid()}.tmp")
        temporary.write_bytes(msgspec.json.encode(document(marks, self._spec, self._rank)))
        temporary.replace(self._path)


class TraceClock(CpuClock):
    """Times as CpuClock does, and notes begin and end of every lap in the steps that are traced."""

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
    head = [_name(rank, 0, "process_name", f"rank {rank}"), _order(rank, 0, "process_sort_index", rank)]
    for track, name in names.items():
        head += [_name(rank, track, "thread_name", name), _order(rank, track, "thread_sort_index", track)]
    # Longer ones first: what a span lies within comes before it.
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
    """The same for all processes whose `perf_counter_ns` is one clock: those of one start of one kernel."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


_KINDS = {"step": "step", "bucket": "exchange", "launch": "launch", "evaluation": "aside", "checkpoint": "aside"}


def _event(mark: Mark, rank: int) -> dict[str, Any]:
    more = mark.more or {}
    name = {"step": f"step {mark.step}", "launch": "start bucket", "bucket": "exchange"}.get(mark.name, mark.name)
    if "bucket" in more:
        name = f"{name} {more['bucket']}" if mark.name == "launch" else f"{name} bucket {more['bucket']}"
    return {
        "ph": "X",
        "cat": _KINDS.get(mark.name, "phase"),
        "name": name,
        "pid": rank,
        "tid": FIRST_BUCKET + more["bucket"] if mark.name == "bucket" else THREAD,
        "ts": mark.begin / 1e3,
        "dur": (mark.end - mark.begin) / 1e3,
        "args": {"step": mark.step, **more},
    }


def _name(rank: int, track: int, kind: str, text: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": track, "args": {"name": text}}


def _order(rank: int, track: int, kind: str, place: int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": track, "args": {"sort_index": place}}


Interval = tuple[float, float]


@dataclass(frozen=True)
class Bucket:
    index: int
    bytes: int
    begin: float
    end: float


@dataclass
class TracedStep:
    """One step of one rank as it was read again; microseconds."""

    begin: float = 0.0
    end: float = 0.0
    phases: list[tuple[str, float, float]] = field(default_factory=list)
    buckets: list[Bucket] = field(default_factory=list)
    launches: list[Interval] = field(default_factory=list)
    """While the rank's thread was busy with starting an exchange (a backend may even end it there)."""

    def of(self, *names: str) -> list[Interval]:
        return [(begin, end) for name, begin, end in self.phases if name in names]

    def computing_by_phase(self) -> dict[str, list[Interval]]:
        """While the rank's thread computed, and did not start an exchange."""
        launches = union(self.launches)
        return {name: without(union(self.of(name)), launches) for name in PHASES if name != "exchange"}

    @property
    def computing(self) -> list[Interval]:
        return union([span for spans in self.computing_by_phase().values() for span in spans])

    @property
    def communicating(self) -> list[Interval]:
        """The buckets' exchange; where there are none, what the clock counts as exchange."""
        return union([(b.begin, b.end) for b in self.buckets] or self.of("exchange"))


def read(run: Run, rank: int) -> dict[str, Any] | None:
    """A rank's trace file, where there is a whole one of a format that is known."""
    try:
        return check(run.rank_folder(rank) / FILE)
    except Damaged:
        return None


def check(path: Path) -> dict[str, Any] | None:
    """A trace file as above; where it is damaged, the error says how."""
    content = read_record(path, shapes.TraceFile)
    if content is None or content["lockstep"].get("format") != FORMAT:
        return None
    try:
        msgspec.convert(list(spans(content)), list[shapes.Span])
        msgspec.convert([event["args"] for event in spans(content) if event["cat"] == "exchange"], list[shapes.Bucket])
    except msgspec.ValidationError as error:
        raise Damaged(f"{path.name}: {error}") from None
    return content


def traced_steps(content: Mapping[str, Any]) -> dict[int, TracedStep]:
    """The steps in a rank's trace, by number."""
    found: dict[int, TracedStep] = {}
    for event in spans(content):
        step = found.setdefault(event["args"]["step"], TracedStep())
        begin, end = event["ts"], event["ts"] + event["dur"]
        kind = event["cat"]
        if kind == "step":
            step.begin, step.end = begin, end
        elif kind == "phase":
            step.phases.append((event["name"], begin, end))
        elif kind == "exchange":
            step.buckets.append(Bucket(event["args"]["bucket"], event["args"]["bytes"], begin, end))
        elif kind == "launch":
            step.launches.append((begin, end))
    return {number: step for number, step in sorted(found.items()) if step.end}


def spans(content: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    return (event for event in content["traceEvents"] if event["ph"] == "X")


def union(intervals: list[Interval]) -> list[Interval]:
    """The same time without overlaps, in order."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif end > begin:
            found.append((begin, end))
    return found


def common(one: list[Interval], other: list[Interval]) -> list[Interval]:
    """What two unions share."""
    pairs = ((max(a, c), min(b, d)) for a, b in one for c, d in other)
    return [(begin, end) for begin, end in pairs if end > begin]


def without(whole: list[Interval], part: list[Interval]) -> list[Interval]:
    """What of a union is left without another one."""
    for begin, end in part:
        pieces = (piece for a, b in whole for piece in ((a, min(b, begin)), (max(a, end), b)))
        whole = [(a, b) for a, b in pieces if b > a]
    return whole


def length(intervals: list[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)
