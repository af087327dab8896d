"""Lines with bands or intervals, and marked places."""

from __future__ import annotations

from typing import Any

from lockstep.report.vega.common import (
    PLAIN,
    SHOWN,
    Spec,
    axis_of,
    base,
    colour,
    ink,
    keep,
    legend,
    lookup,
    place,
    scale_of,
    unit_name,
)
from lockstep.report.views import Lines, Series

SHAPES = ("circle", "square", "triangle-up", "diamond")
# Lines of more points than this are drawn without marks.
MARKED_UP_TO = 30
LINE_HEIGHT = 16
# Intervals of one place stand beside each other, so many dots apart.
APART = 8


def lines(chart: Lines) -> Spec:
    x, y = _channels(chart)
    names = {one.name: one.colour for one in chart.series}
    dashes = {"domain": list(names), "range": [[6, 4] if one.dash else [1, 0] for one in chart.series]}
    shapes = {"domain": list(names), "range": [shape(one) for one in chart.series]}
    ink_by_name = colour("name", names)
    line: Spec = {"x": x, "y": y("y"), "color": ink_by_name}
    key = {"field": "name", "type": "nominal", "title": None, "legend": legend(list(names))}
    about = {one.name: _about(chart, one) for one in chart.series}
    layers: list[Spec] = []
    if any(each["banded"] for each in about.values()):
        layers.append(
            {
                "transform": [keep(f"{lookup('about', 'name')}.banded && isValid(datum.low)")],
                "mark": {"type": "area", "opacity": 0.15},
                "encoding": {**line, "y": y("low"), "y2": {"field": "high"}, "color": {**ink_by_name, "legend": None}},
            }
        )
    if any(each["barred"] for each in about.values()):
        layers += _intervals(line, y)
    moved = {"xOffset": {"expr": "datum.aside"}}
    layers += [
        {
            "mark": {"type": "line", "strokeWidth": 2, "strokeJoin": "round", **moved},
            "encoding": {**line, "strokeDash": {**key, "scale": dashes}},
        },
        {
            "transform": [keep(f"{lookup('about', 'name')}.marked && isValid(datum.y)")],
            "mark": {"type": "point", "filled": True, "size": 40, "opacity": 1, "stroke": ink("page"), "strokeWidth": 1}
            | moved,
            "encoding": {**line, "shape": {**key, "scale": shapes}},
        },
        *_marks(chart, x),
        _cursor(x),
        {
            "transform": [keep("datum.x === at && isValid(datum.y)")],
            "mark": {"type": "point", "filled": True, "size": 80, "opacity": 1, "stroke": ink("page")} | moved,
            "encoding": {**line, "color": {**ink_by_name, "legend": None}},
        },
    ]
    _, above = unit_name(chart.y, [value for one in chart.series for value in one.y])
    spec = base(
        chart,
        layers,
        above,
        off=[one.name for one in chart.series if not one.shown],
        gone=chart.hidden,
        named=[one.name for one in chart.series if one.shown and one.role not in chart.hidden],
        about=about,
    )
    spec["title"]["offset"] = 10 + LINE_HEIGHT * len(chart.marks)
    return spec | {"data": {"name": "series"}, "transform": _points()}


def shape(one: Series) -> str:
    number = one.colour[1:]
    return SHAPES[int(number) % len(SHAPES)] if number.isdigit() else "circle"


def _channels(chart: Lines) -> tuple[Spec, Any]:
    named = any(one.texts for one in chart.series)
    xs = [value for one in chart.series for value in one.x]
    ys = [value for one in chart.series for value in (*one.y, *one.low, *one.high)]
    _, below = unit_name(chart.x, xs)
    count = {"expr": "max(2, floor(width / 70))"}
    x = place(
        "x",
        axis_of(chart.x, xs, grid=False, tickCount=count, title=below, titleAnchor="end", titlePadding=6),
        scale_of(chart.x, padding=30 if named else 8),
    )
    axis = axis_of(chart.y, ys, grid=True, tickCount=6, domain=False, ticks=False, labelPadding=6)
    scale = scale_of(chart.y, padding=10) | ({"zero": True} if chart.y.unit == "times" else {})

    def y(field: str) -> Spec:
        return place(field, axis, scale)

    return x, y


def _about(chart: Lines, one: Series) -> dict[str, Any]:
    """How a line is drawn: whether its intervals are bars at its points or a band, whether its points are marked."""
    barred = [each.name for each in chart.series if _barred(each)]
    return {
        "barred": one.name in barred,
        "banded": bool(one.low) and one.name not in barred,
        "marked": len(one.x) == 1 or (len(one.x) <= MARKED_UP_TO and one.colour != "faint" and one.role != "ranks"),
        "aside": APART * (barred.index(one.name) - (len(barred) - 1) / 2) if one.name in barred else 0,
    }


def _barred(one: Series) -> bool:
    return bool(one.low and (one.texts or len(one.x) == 1))


def _points() -> list[Spec]:
    """From lines to their points; those that are switched off are left out, so that the axes fit what is seen."""
    lists = ("low", "high", "texts")
    return [
        SHOWN,
        *({"calculate": f"datum.{name} || []", "as": name} for name in lists),
        {"flatten": ["x", "y", *lists]},
        keep("isValid(datum.x)"),
        {"calculate": f"isValid(datum.low) ? {lookup('about', 'name')}.aside : 0", "as": "aside"},
    ]


def _intervals(line: Spec, y: Any) -> list[Spec]:
    only = [keep(f"{lookup('about', 'name')}.barred && isValid(datum.low) && isValid(datum.high)")]
    moved = {"xOffset": {"expr": "datum.aside"}, "opacity": 0.75}
    silent = {**line, "color": {**line["color"], "legend": None}}
    end: Spec = {"type": "tick", "orient": "horizontal", "size": 10, "thickness": 1.4, **moved}
    return [
        {
            "transform": only,
            "mark": {"type": "rule", "strokeWidth": 1.4, **moved},
            "encoding": {**silent, "y": y("low"), "y2": {"field": "high"}},
        },
        *({"transform": only, "mark": end, "encoding": {**silent, "y": y(field)}} for field in ("low", "high")),
    ]


def _marks(chart: Lines, x: Spec) -> list[Spec]:
    """A dashed line at each marked place, and its words above the plot, one line for each."""
    if not chart.marks:
        return []
    last = len(chart.marks) - 1
    rows = [
        {"x": mark.x, "text": mark.text, "colour": mark.colour, "high": -6 - LINE_HEIGHT * (last - number)}
        for number, mark in enumerate(chart.marks)
    ]
    # The words stay within the plot: they begin, end or are centred at their place.
    side = "scale('x', datum.x) / width"
    shade = {"expr": lookup("palette", "colour")}
    return [
        {
            "data": {"values": rows},
            "mark": {
                "type": "rule",
                "color": shade,
                "strokeWidth": 1.4,
                "strokeDash": [3, 3],
                "y": {"expr": "datum.high + 4"},
                "y2": {"expr": "height"},
            },
            "encoding": {"x": x},
        },
        {
            "data": {"values": rows},
            "mark": {
                "type": "text",
                "color": shade,
                "fontSize": PLAIN,
                "fontWeight": 600,
                "baseline": "alphabetic",
                "align": {"expr": f"{side} < 0.35 ? 'left' : {side} > 0.65 ? 'right' : 'center'"},
                "limit": {"expr": "width * 0.9"},
                "y": {"expr": "datum.high"},
            },
            "encoding": {"x": x, "text": {"field": "text", "type": "nominal"}},
        },
    ]


def _cursor(x: Spec) -> Spec:
    return {
        "data": {"values": [{}]},
        "transform": [keep("at !== null"), {"calculate": "at", "as": "x"}],
        "mark": {"type": "rule", "color": ink("faint"), "strokeWidth": 1},
        "encoding": {"x": x},
    }
