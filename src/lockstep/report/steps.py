"""Where a step goes: stacked bars by cell and by rank, and the fall from the ideal step to the measured one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lockstep.explain.speedup import CAUSES, Ends, intervals, losses
from lockstep.measure.phases import NAMES, Parts
from lockstep.report.subject import Subject
from lockstep.report.views import Axis, Bar, Bars, Fall, Waterfall, sure
from lockstep.study.gather import Group
from lockstep.study.timing import CellTime
from lockstep.units import span, text

SECTION = "step"
MOST_RANKS = 16


def charts(subject: Subject) -> list[Bars | Waterfall]:
    found = [_bars(subject), *(waterfall(group, subject) for group in subject.done)]
    return [chart for chart in found if chart]


def _bars(subject: Subject) -> Bars | None:
    if subject.kind == "run":
        return run_bars(subject.runs[0].split())
    rows: list[Bar] = []
    for group in subject.groups:
        parts = [found for each in group.samples if each.own and (found := each.run.split())]
        if group.time:
            rows.append(_bar(group.name, _raced(group.time)))
            rows += _rank_bars(parts[0], f"{group.name}, ", "ranks") if parts else []
        elif parts:
            # A cell's bar is the mean over its runs and their ranks; the ranks' own bars are those of its first run.
            rows.append(_bar(group.name, _mean([_mean(one) for one in parts])))
            rows += _rank_bars(parts[0], f"{group.name}, ", "ranks")
    return _chart(rows, ["ranks"])


def run_bars(ranks: Sequence[Parts]) -> Bars | None:
    """Of one run: all ranks together, and each by itself."""
    return _chart([_bar("all ranks, mean", _mean(ranks)), *_rank_bars(ranks)] if ranks else [])


def _chart(rows: list[Bar], hidden: Sequence[str] = ()) -> Bars | None:
    if not rows:
        return None
    return Bars(
        id="step",
        section=SECTION,
        title="Where a step goes",
        says="Mean time of each phase over the steps after warm-up. Exchange is what nothing hides; waiting is a rank's exchange beyond that of "
        "the rank that came last; other is what no phase accounts for.",
        x=Axis(label="time of a step", unit="seconds"),
        parts=list(NAMES),
        rows=rows,
        hidden=list(hidden),
    )


def _rank_bars(ranks: Sequence[Parts], before: str = "", role: str = "") -> list[Bar]:
    several = ranks[:MOST_RANKS] if len(ranks) > 1 else []
    return [_bar(f"{before}rank {rank}", parts, role) for rank, parts in enumerate(several)]


def _mean(parts: Sequence[Parts]) -> Parts:
    return {name: float(np.mean([part[name] for part in parts])) for name in NAMES}


def _raced(time: CellTime) -> Parts:
    """The phases that a race has seen; what the ranks waited for each other is in its exchange."""
    phases, total = time.phases(), time.plan.global_batch * time.cost
    known = {name: phases.get(name, 0.0) for name in NAMES}
    return {**known, "other": max(0.0, total - sum(known.values()))}


def _bar(name: str, parts: Parts, role: str = "") -> Bar:
    return Bar(name=name, values=[sure(max(0.0, parts[part])) for part in NAMES], role=role)


def waterfall(group: Group, subject: Subject) -> Waterfall | None:
    """From what `lockstep explain --measure` has measured beside the cell's first run; None where it has not."""
    own = [each.run for each in group.done if each.own]
    ways = own[0].ways() if own else {}
    if not {"whole", "plain", "apart", "together"} <= ways.keys():
        return None
    parts, ends = losses(ways), intervals(ways)
    whole, together = ways["whole"], ways["together"]
    rows, reached = [], parts["ideal"]
    rows.append(_fall("ideal", parts["ideal"], whole.seconds, reached, ends["ideal"], total=True))
    for cause in (*CAUSES, "rest"):
        reached += parts[cause]
        # Causes that were measured apart may overlap: what they come to beyond the step is no saving.
        name = "counted twice" if cause == "rest" and parts[cause] < 0 else cause
        rows.append(_fall(name, parts[cause], whole.seconds, reached, ends[cause]))
    rows.append(_fall("measured", together.seconds, whole.seconds, together.seconds, total=True))
    several = len(subject.begun) > 1
    return Waterfall(
        id=f"speed-up-{subject.place(group) + 1}" if several else "speed-up",
        section=SECTION,
        title="From ideal to measured speed-up" + (f": {group.name}" if several else ""),
        says=f"A step of {together.ranks} ranks if nothing were lost, what each cause adds to it, and the speed-up that is left "
        f"(medians and 95 % intervals of n = {len(together.rounds)} rounds, measured in turns)."
        + (" The causes overlap: what is counted twice is no saving." if parts["rest"] < 0 else ""),
        x=Axis(label="time of a step", unit="seconds"),
        rows=rows,
    )


def _fall(name: str, value: float, whole: float, reached: float, ends: Ends = None, total: bool = False) -> Fall:
    sign = "" if total or value < 0 else "+"
    low, high = ends or (None, None)
    return Fall(
        name=name,
        value=sure(value),
        total=total,
        text=f"{sign}{span(value, low, high, 'seconds')}, {text(whole / reached, 'times')}",
    )
