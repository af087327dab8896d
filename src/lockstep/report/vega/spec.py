"""The spec of any chart."""

from __future__ import annotations

from typing import Any

import msgspec

from lockstep.report.vega.bars import bars, waterfall
from lockstep.report.vega.common import Spec
from lockstep.report.vega.lines import lines
from lockstep.report.vega.points import points
from lockstep.report.vega.scatter import scatter
from lockstep.report.vega.timeline import timeline
from lockstep.report.views import AnyChart, Bars, Lines, Points, Scatter, Waterfall


def spec(chart: AnyChart, narrow: bool = False) -> Spec:
    """Without data: `data` has them. `narrow` is for phones."""
    if isinstance(chart, Lines):
        return lines(chart)
    if isinstance(chart, Scatter):
        return scatter(chart)
    if isinstance(chart, Bars):
        return bars(chart, narrow)
    if isinstance(chart, Waterfall):
        return waterfall(chart, narrow)
    if isinstance(chart, Points):
        return points(chart, narrow)
    return timeline(chart)


def with_data(chart: AnyChart) -> Spec:
    """Whole, as a file of its own would have it."""
    found = spec(chart)
    return found | {"datasets": {found["data"]["name"]: msgspec.to_builtins(chart)[found["data"]["name"]]}}


def for_page(chart: AnyChart) -> dict[str, Any]:
    """A chart as the page draws it: its own data, and beside them the specs for wide and narrow pages."""
    wide, narrow = spec(chart), spec(chart, narrow=True)
    found: dict[str, Any] = {**msgspec.to_builtins(chart), "spec": wide}
    return found | ({"narrow": narrow} if narrow != wide else {})
