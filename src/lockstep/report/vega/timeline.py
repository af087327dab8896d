"""What every rank did, along a time axis."""

from __future__ import annotations

from lockstep.report.vega import common as vl
from lockstep.report.views import Lane, Timeline

THICK, THIN = 24, 12
# Between ranks, and between a rank and what goes with it.
FAR, NEAR = 12, 3
# Dots that the name of a step needs.
STEP_ROOM = 62


def timeline(chart: Timeline) -> vl.Spec:
    tops, high = _tops(chart.lanes)
    centres = [top + _thick(lane) / 2 for top, lane in zip(tops, chart.lanes, strict=True)]
    last = max((span.end for lane in chart.lanes for span in lane.spans), default=1.0)
    x_axis = vl.below(chart.x, [last], 90, grid=True, domain=False, ticks=False)
    x_scale = vl.scale_of(chart.x, domain=[0, last])
    y_axis: vl.Spec = {
        "title": None,
        "domain": False,
        "ticks": False,
        "grid": False,
        "values": centres,
        "labelExpr": "lane_names[indexof(centres, datum.value)]",
        "labelColor": vl.ink("ink"),
        "labelPadding": 8,
        "labelOverlap": False,
    }
    y = vl.place("top", y_axis, {"domain": [0, high], "range": [0, high], "nice": False, "zero": False})
    span: vl.Spec = {"x": vl.place("begin", x_axis, x_scale), "x2": {"field": "end"}, "y": y, "y2": {"field": "bottom"}}
    part = vl.colour("part", {name: name for name in chart.parts})
    layers: list[vl.Spec] = [
        {
            "mark": {"type": "rect", "stroke": {"expr": vl.lookup("palette", "part")}, "strokeWidth": 0.4},
            "encoding": {**span, "color": part},
        },
        {
            "transform": [vl.keep("datum.place === at")],
            "mark": {"type": "rect", "filled": False, "stroke": vl.ink("ink"), "strokeWidth": 1.5},
            "encoding": span,
        },
        *_marks(chart, vl.place("x", x_axis, x_scale), last),
    ]
    used = {span.part for lane in chart.lanes for span in lane.spans}
    spec = vl.base(
        chart,
        layers,
        named=[name for number, name in enumerate(chart.parts) if number in used],
        parts=chart.parts,
        tops=tops,
        bottoms=[top + _thick(lane) for top, lane in zip(tops, chart.lanes, strict=True)],
        centres=centres,
        lane_names=[lane.name for lane in chart.lanes],
    )
    spec["title"]["offset"] = 20
    return spec | {"data": {"name": "lanes"}, "height": high, "transform": _spans()}


def _thick(lane: Lane) -> int:
    return THIN if lane.thin else THICK


def _tops(lanes: list[Lane]) -> tuple[list[int], int]:
    """The upper edge of every lane, and the height of all."""
    found, at = [], 0
    for number, lane in enumerate(lanes):
        at += 0 if number == 0 else NEAR if lane.thin else FAR
        found.append(at)
        at += _thick(lane)
    return found, at + 8


def _spans() -> list[vl.Spec]:
    """From lanes to their stretches. `place` counts them over all lanes, as the arrow keys go through them."""
    return [
        {"window": [{"op": "row_number", "as": "lane"}]},
        {"calculate": "tops[datum.lane - 1]", "as": "top"},
        {"calculate": "bottoms[datum.lane - 1]", "as": "bottom"},
        {"flatten": ["spans"], "as": ["span"]},
        {"window": [{"op": "row_number", "as": "number"}]},
        {"calculate": "datum.number - 1", "as": "place"},
        {"calculate": "parts[datum.span[0]]", "as": "part"},
        {"calculate": "datum.span[1]", "as": "begin"},
        {"calculate": "datum.span[2]", "as": "end"},
        vl.keep("indexof(off, datum.part) < 0"),
    ]


def _marks(chart: Timeline, x: vl.Spec, last: float) -> list[vl.Spec]:
    """Where steps begin. Names are left out where they would overlap."""
    if not chart.marks:
        return []
    rows = [{"x": mark.x, "text": mark.text, "number": number} for number, mark in enumerate(chart.marks)]
    gap = min((later.x - mark.x for mark, later in zip(chart.marks, chart.marks[1:], strict=False)), default=last)
    every = f"max(1, ceil({STEP_ROOM} * {last!r} / max(1, width) / {max(gap, 1e-12)!r}))"
    return [
        {
            "data": {"values": rows},
            "mark": {
                "type": "rule",
                "color": vl.ink("faint"),
                "strokeDash": [3, 3],
                "y": -10,
                "y2": {"expr": "height"},
            },
            "encoding": {"x": x},
        },
        {
            "data": {"values": rows},
            "transform": [vl.keep(f"datum.number % {every} === 0")],
            "mark": {"type": "text", "align": "left", "dx": 3, "fontSize": vl.SMALL, "color": vl.ink("ink"), "y": -8},
            "encoding": {"x": x, "text": {"field": "text", "type": "nominal"}},
        },
    ]
