"""How the times of single steps are distributed: what is usual, and how long the slow ones take."""

from __future__ import annotations

import numpy as np

from lockstep.measure.phases import Rows
from lockstep.report.curves import MOST_SHOWN
from lockstep.report.subject import Subject
from lockstep.report.views import Axis, Lines, Mark, Series, shorts, sure
from lockstep.units import duration

SECTION = "step"
# Fewer steps have no shape.
FEWEST = 20
MOST_BINS = 60
# What lies beyond these shares of all steps is not drawn: one step of a second would leave no room for a thousand of a millisecond.
ENDS = (0.001, 0.99)
# Where the slow ones take this many times as long as the quick ones, the axis is logarithmic.
FAR = 4.0


def charts(subject: Subject) -> list[Lines]:
    """Of the first training of each cell, if it is its own."""
    groups = [group for group in subject.trained[:MOST_SHOWN] if group.samples[0].own]
    times = {
        group.name: (group, found) for group in groups if len(found := _times(group.samples[0].run.after_warmup()))
    }
    known = {name: (group, found) for name, (group, found) in times.items() if len(found) >= FEWEST}
    if not known:
        return []
    several = len(subject.trained) > 1
    low = min(float(np.quantile(found, ENDS[0])) for _, found in known.values())
    high = max(float(np.quantile(found, ENDS[1])) for _, found in known.values())
    # As many bins as the steps of the shortest run can fill.
    bins = int(np.clip(min(len(found) for _, found in known.values()) ** 0.5, 8, MOST_BINS))
    high, log = max(high, low * 1.01), high > FAR * low
    edges = np.geomspace(low, high, bins + 1) if log else np.linspace(low, high, bins + 1)
    series = [
        _outline(f"{name}: {_words(found)}" if several else "steps", found, edges, subject.colour(group).name)
        for name, (group, found) in known.items()
    ]
    which = ", of each cell's first run" if several else ""
    slowest = max(float(found.max()) for _, found in known.values())
    beyond = f" The slowest one took {duration(slowest)}." if slowest > edges[-1] else ""
    return [
        Lines(
            id="step-times",
            section=SECTION,
            title="How long steps take",
            says=f"Share of the steps after warm-up by their time, of the slowest rank{which}.{beyond}",
            x=Axis("time of a step", "seconds", log=log),
            y=Axis("share of steps", "percent"),
            series=series,
            marks=[] if several else _marks(next(iter(known.values()))[1]),
        )
    ]


def _times(ranks: list[Rows]) -> Rows:
    """Seconds of each step: of its slowest rank."""
    return np.max([rows["total_ns"] for rows in ranks], axis=0) / 1e9 if ranks and len(ranks[0]) else np.empty(0)


def _outline(name: str, times: Rows, edges: Rows, colour: str) -> Series:
    """The outline of a histogram: as points in the middle of its bins."""
    counts, _ = np.histogram(times, edges)
    return Series(
        name=name,
        colour=colour,
        x=shorts((np.sqrt(edges[:-1] * edges[1:])).tolist()),
        y=shorts((counts / len(times)).tolist()),
    )


def _middle(times: Rows) -> tuple[float, float]:
    return float(np.median(times)), float(np.quantile(times, 0.95))


def _words(times: Rows) -> str:
    median, most = _middle(times)
    return f"median {duration(median)}, 95 % within {duration(most)}"


def _marks(times: Rows) -> list[Mark]:
    median, most = _middle(times)
    return [
        Mark(x=sure(median), text=f"median {duration(median)}", colour="muted"),
        Mark(x=sure(most), text=f"95 % within {duration(most)}", colour="warn"),
    ]
