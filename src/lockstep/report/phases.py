"""The plot of where a step goes: one for the report and for the dashboard, which knows it while the run goes on."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.explain.step import NAMES
from lockstep.report.views import Axis, Bar, Bars

SECTION = "step"
MOST_RANKS = 16


def bars(rows: Sequence[Bar], hidden: Sequence[str] = ()) -> Bars:
    """`rows`: seconds of each phase, in the order of NAMES."""
    return Bars(
        id="step",
        section=SECTION,
        title="Where a step goes",
        says="Mean time of each phase over the steps after warm-up. Exchange is what nothing hides; waiting is a rank's exchange beyond that of "
        "the rank that came last; other is what no phase accounts for.",
        x=Axis(label="time of a step", unit="seconds"),
        parts=list(NAMES),
        rows=list(rows),
        hidden=list(hidden),
    )
