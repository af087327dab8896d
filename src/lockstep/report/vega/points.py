"""Values with their intervals, one a row."""

from __future__ import annotations

from functools import partial

from lockstep.report.vega import common as vl
from lockstep.report.vega.bars import beside, height, here, names_above, room_for, rows
from lockstep.report.views import Points

OWN = {"expr": vl.lookup("palette", "colour")}


def points(chart: Points, on_phone: bool) -> vl.Spec:
    narrow = names_above([row.name for row in chart.rows], on_phone)
    values = [value for row in chart.rows for value in (row.value, row.low, row.high)]
    axis = vl.below(chart.x, values, 90, grid=True, domain=False, ticks=False)
    room = room_for([row.text for row in chart.rows])
    # What is written stands to the right of all, and the first value a little to the right of the edge.
    scale = vl.scale_of(chart.x, zero=vl.from_zero(values), range=[8, {"expr": f"width - {room:.0f}"}])
    x, y = partial(vl.place, axis=axis, scale=scale), rows(narrow, on_phone)
    layers: list[vl.Spec] = [
        here(y),
        {
            "mark": {"type": "rule", "strokeWidth": 2, "opacity": 0.75, "color": OWN},
            "encoding": {"y": y, "x": x("from"), "x2": {"field": "to"}},
        },
        {
            "mark": {"type": "point", "filled": True, "opacity": 1, "size": 70, "color": OWN},
            "encoding": {"y": y, "x": x("value")},
        },
        {
            "mark": beside({"text": {"expr": "datum.text"}, "x": {"expr": f"width - {room - 8:.0f}"}}),
            "encoding": {"y": y},
        },
    ]
    return vl.base(chart, layers) | {
        "data": {"name": "rows"},
        # Where there is no interval it has no width.
        "transform": [
            {"calculate": "isValid(datum.low) ? datum.low : datum.value", "as": "from"},
            {"calculate": "isValid(datum.high) ? datum.high : datum.value", "as": "to"},
        ],
        **height(len(chart.rows), narrow),
    }
