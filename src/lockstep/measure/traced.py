"""A trace read back (trace.py writes it): its steps, and when a rank computed and communicated in each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from lockstep import shapes
from lockstep.measure.records import PHASES
from lockstep.measure.trace import FILE, FORMAT
from lockstep.reading import Damaged, read_record
from lockstep.run import Run

Interval = tuple[float, float]


@dataclass(frozen=True)
class Bucket:
    index: int
    bytes: int
    begin: float
    end: float


@dataclass
class TracedStep:
    """One step of one rank, as read from a trace; microseconds."""

    begin: float = 0.0
    end: float = 0.0
    phases: list[tuple[str, float, float]] = field(default_factory=list)
    buckets: list[Bucket] = field(default_factory=list)
    launches: list[Interval] = field(default_factory=list)
    """While the rank's thread was starting an exchange (a backend may even complete it there)."""

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
        """The buckets' exchange; without buckets, the clock's exchange."""
        return union([(b.begin, b.end) for b in self.buckets] or self.of("exchange"))


def read(run: Run, rank: int) -> dict[str, Any] | None:
    """A rank's trace file; None if there is none that is complete and of a known format."""
    try:
        return check(run.rank_folder(rank) / FILE)
    except Damaged:
        return None


def check(path: Path) -> dict[str, Any] | None:
    """The same, but a damaged file is an error that says how."""
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
    """The union of spans, in order and without overlaps."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif end > begin:
            found.append((begin, end))
    return found


def common(one: list[Interval], other: list[Interval]) -> list[Interval]:
    """The intersection of two unions."""
    pairs = ((max(a, c), min(b, d)) for a, b in one for c, d in other)
    return [(begin, end) for begin, end in pairs if end > begin]


def without(whole: list[Interval], part: list[Interval]) -> list[Interval]:
    """The difference of two unions."""
    for begin, end in part:
        pieces = (piece for a, b in whole for piece in ((a, min(b, begin)), (max(a, end), b)))
        whole = [(a, b) for a, b in pieces if b > a]
    return whole


def length(intervals: list[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)
