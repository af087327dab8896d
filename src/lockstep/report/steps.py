"""Where a step goes: stacked bars by cell and by rank, and the fall from the ideal step to the measured one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lockstep.explain.evidence import Evidence
from lockstep.explain.speedup import CAUSES, losses
from lockstep.explain.step import NAMES, split
from lockstep.report.phases import MOST_RANKS, SECTION, bars
from lockstep.report.subject import Subject
from lockstep.report.units import text
from lockstep.report.views import Axis, Bar, Bars, Fall, Waterfall, sure
from lockstep.run import Run
from lockstep.study.gather import Group

Parts = dict[str, float]


def charts(subject: Subject) -> list[Bars | Waterfall]:
    found = _bars(subject)
    falls = [
        fall for group in subject.done for each in group.done[:1] if (fall := waterfall(each.run, group.name, subject))
    ]
    return [*([found] if found else []), *falls]


def _bars(subject: Subject) -> Bars | None:
    rows: list[Bar] = []
    single = subject.kind == "run"
    for group in subject.begun:
        parts = [found for each in group.samples if (found := _split(each.run))]
        if not parts:
            continue
        # A cell's bar is the mean over its runs and their ranks; the ranks' own bars are those of its first run.
        rows.append(_bar("all ranks, mean" if single else group.name, [_mean(one) for one in parts]))
        if len(parts[0]) > 1:
            rows += [
                _bar(f"rank {rank}" if single else f"{group.name}, rank {rank}", [one], "" if single else "ranks")
                for rank, one in enumerate(parts[0][:MOST_RANKS])
            ]
    if not rows:
        return None
    return bars(rows, [] if single else ["ranks"])


def _split(run: Run) -> list[Parts] | None:
    ranks = Evidence(run).ranks
    return split(ranks) if len(ranks[0]) else None


def _mean(parts: Sequence[Parts]) -> Parts:
    return {name: float(np.mean([part[name] for part in parts])) for name in NAMES}


def _bar(name: str, parts: Sequence[Parts], role: str = "") -> Bar:
    mean = _mean(parts)
    return Bar(name=name, values=[sure(max(0.0, mean[part])) for part in NAMES], role=role)


def waterfall(run: Run, name: str, subject: Subject) -> Waterfall | None:
    """From what `lockstep explain --measure` has measured beside the run; None where it has not."""
    ways = Evidence(run).ways
    if not {"whole", "plain", "apart", "together"} <= ways.keys():
        return None
    parts = losses(ways)
    whole, together = ways["whole"], ways["together"]
    rows, reached = [], parts["ideal"]
    rows.append(_fall("ideal", parts["ideal"], whole.seconds, reached, total=True))
    for cause in (*CAUSES, "rest"):
        reached += parts[cause]
        rows.append(_fall(cause, parts[cause], whole.seconds, reached))
    rows.append(_fall("measured", together.seconds, whole.seconds, together.seconds, total=True))
    several = len(subject.begun) > 1
    return Waterfall(
        id=f"speed-up-{subject.place(_group_of(run, subject)) + 1}" if several else "speed-up",
        section=SECTION,
        title="From ideal to measured speed-up" + (f": {name}" if several else ""),
        says=f"A step of {together.ranks} ranks if nothing were lost, what each cause adds to it, and the speed-up that is left "
        f"(n = {len(together.rounds)} rounds, measured in turns).",
        x=Axis(label="time of a step", unit="seconds"),
        rows=rows,
    )


def _group_of(run: Run, subject: Subject) -> Group:
    return next(group for group in subject.groups if any(each.run.id == run.id for each in group.samples))


def _fall(name: str, value: float, whole: float, reached: float, total: bool = False) -> Fall:
    sign = "" if total or value < 0 else "+"
    return Fall(
        name=name,
        value=sure(value),
        total=total,
        text=f"{sign}{text(value, 'seconds')}, {text(whole / reached, 'times')}",
    )
