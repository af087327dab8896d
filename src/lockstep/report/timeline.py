"""The timeline of a few steps of every rank: from the run's trace where it has one, else from the phases of its step records."""

from __future__ import annotations

import numpy as np

from lockstep.export.perfetto import shifts
from lockstep.measure.phases import Rows
from lockstep.measure.records import PHASES
from lockstep.measure.traced import TracedStep, read, traced_steps
from lockstep.measure.view import RunView
from lockstep.report.subject import Subject
from lockstep.report.views import Axis, Lane, Mark, Span, Timeline, sure

SECTION = "timeline"
STEPS = 4
MOST_RANKS = 16
MOST_RUNS = 3
PARTS = (*PHASES, "other", "bucket")
# Clocks of two hosts differ by more than this many steps.
FAR = 20


def charts(subject: Subject) -> list[Timeline]:
    """Of the first run of a few cells, those with most ranks."""
    groups = sorted(subject.trained, key=lambda group: -group.samples[0].spec.plan.ranks)[:MOST_RUNS]
    several = len(subject.trained) > 1
    found = []
    for number, group in enumerate(groups, 1):
        chart = of_run(group.samples[0].run, f": {group.name}" if several else "", f"-{number}" if several else "")
        if chart:
            found.append(chart)
    return found


def of_run(run: RunView, title: str = "", tail: str = "") -> Timeline | None:
    traced = _from_trace(run)
    lanes, marks, how = traced or _from_steps(run)
    if not lanes:
        return None
    return Timeline(
        id=f"timeline{tail}",
        section=SECTION,
        title=f"A few steps of every rank{title}",
        says=how,
        x=Axis(label="time", unit="seconds"),
        parts=list(PARTS),
        lanes=lanes,
        marks=marks,
    )


Drawn = tuple[list[Lane], list[Mark], str]


def _from_trace(run: RunView) -> Drawn | None:
    ranks = range(min(run.ranks, MOST_RANKS))
    traces = {rank: content for rank in ranks if (content := read(run, rank))}
    if not traces:
        return None
    moved = shifts(traces)
    steps = {rank: traced_steps(content) for rank, content in traces.items()}
    common = sorted(set.intersection(*(set(found) for found in steps.values())))[:STEPS]
    if not common:
        return None
    zero = min(steps[rank][number].begin + moved[rank] for rank in steps for number in common)
    lanes = []
    for rank, found in steps.items():
        chosen = [found[number] for number in common]
        lanes += _traced_lanes(rank, chosen, moved[rank] - zero)
    first = steps[min(steps)]
    marks = [
        Mark(x=_second(first[number].begin, moved[min(steps)] - zero), text=f"step {number:,}") for number in common
    ]
    return (
        lanes,
        marks,
        "From the run's trace: what each rank's thread did, and below it the exchange of each bucket of gradients.",
    )


def _traced_lanes(rank: int, steps: list[TracedStep], shift: float) -> list[Lane]:
    own = [
        Span(PARTS.index(name) if name in PARTS else PARTS.index("other"), _second(begin, shift), _second(end, shift))
        for step in steps
        for name, begin, end in sorted(step.phases, key=lambda phase: phase[1])
    ]
    buckets = [
        Span(PARTS.index("bucket"), _second(b.begin, shift), _second(b.end, shift), f"bucket {b.index}, {b.bytes:,} B")
        for step in steps
        for b in step.buckets
    ]
    lanes = [Lane(name=f"rank {rank}", spans=own)]
    return [*lanes, Lane(name="buckets", spans=buckets, thin=True)] if buckets else lanes


def _second(microseconds: float, shift: float) -> float:
    return sure((microseconds + shift) / 1e6)


def _from_steps(run: RunView) -> Drawn:
    """Phases one after the other, as long as they took; where a step has several passes, each phase stands for all of them."""
    ranks = [run.steps(rank) for rank in range(min(run.ranks, MOST_RANKS))]
    length = min((len(rows) for rows in ranks), default=0)
    if not length or not ranks[0]["start_ns"][:length].all():
        return [], [], ""
    # From the middle of the run: the first steps are of warm-up, and the last batch of an epoch may be a small one.
    first = max(0, min(length // 2, length - STEPS))
    chosen = [rows[first : first + STEPS] for rows in ranks]
    moved = _moved(chosen)
    zero = min(int(rows["start_ns"][0]) + shift for rows, shift in zip(chosen, moved, strict=True))
    lanes = [
        Lane(name=f"rank {rank}", spans=[span for row in rows for span in _spans(row, shift - zero)])
        for rank, (rows, shift) in enumerate(zip(chosen, moved, strict=True))
    ]
    marks = [
        Mark(x=sure((int(row["start_ns"]) + moved[0] - zero) / 1e9), text=f"step {int(row['step']):,}")
        for row in chosen[0]
    ]
    how = "From the step records, in the middle of the run: each phase as long as it took, one after the other."
    if any(moved):
        how += " Ranks of other hosts are moved so that their exchanges end together: their clocks are not this one's."
    return lanes, marks, how + " 'lockstep run --trace 20' keeps a real trace."


def _moved(ranks: list[Rows]) -> list[int]:
    """Nanoseconds to add to each rank's clock: none on one host."""
    starts = np.array([rows["start_ns"][0] for rows in ranks])
    step = float(np.mean([rows["total_ns"].mean() for rows in ranks]))
    if np.ptp(starts) < FAR * max(step, 1.0):
        return [0] * len(ranks)
    ends = [_exchanged(rows) for rows in ranks]
    return [int(np.median(ends[0] - end)) for end in ends]


def _exchanged(rows: Rows) -> Rows:
    return np.asarray(
        rows["start_ns"] + rows["data_ns"] + rows["forward_ns"] + rows["backward_ns"] + rows["exchange_ns"]
    )


def _spans(row: Rows, shift: int) -> list[Span]:
    at = int(row["start_ns"]) + shift
    end = at + int(row["total_ns"])
    found = []
    for place, phase in enumerate(PHASES):
        took = int(row[f"{phase}_ns"])
        if took:
            found.append(Span(place, sure(at / 1e9), sure((at + took) / 1e9)))
        at += took
    if end > at:
        found.append(Span(PARTS.index("other"), sure(at / 1e9), sure(end / 1e9)))
    return found
