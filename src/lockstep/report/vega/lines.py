"""Lines with bands or intervals, and marked places."""

from __future__ import annotations

from functools import partial
from typing import Any

from lockstep.report.vega import common as vl
from lockstep.report.views import Axis, Lines, Series

OWN = {"expr": vl.lookup("palette", "colour")}
NAME = {"field": "name", "type": "nominal", "title": None}
# The shapes of marks and their sizes, in square dots, so that all look equally large.
SIZES = {"circle": 40, "square": 40, "triangle-up": 90, "diamond": 80}
# Lines of more points than this are drawn without marks.
MARKED_UP_TO = 30
LINE_HEIGHT = 16
# A little more memory looks like a leak, and a little speed-up like much, on an axis that begins elsewhere.
FROM_ZERO = ("times", "bytes")
# Intervals at one position stand beside each other, this many pixels apart.
APART = 8


def lines(chart: Lines) -> vl.Spec:
    x, y, above = _channels(chart)
    about = {one.name: _about(chart, one) for one in chart.series}
    # Only the line, its band and its bars make the axes; all else is put where they say.
    layers: list[vl.Spec] = []
    if any(each["banded"] for each in about.values()):
        layers.append(_band(x, y))
    if any(each["barred"] for each in about.values()):
        layers += _intervals(x, y)
    layers += [_line(chart, x, y), *_marks(chart, x), _cursor(), _marked()]
    spec = vl.base(
        chart,
        layers,
        above,
        off=[one.name for one in chart.series if not one.shown],
        gone=chart.hidden,
        named=[one.name for one in chart.series if one.shown and one.role not in chart.hidden],
        about=about,
    )
    spec["title"]["offset"] = 10 + LINE_HEIGHT * len(chart.marks)
    # What the page puts in: another axis below, and the values behind a line that was smoothed.
    choices: vl.Spec = {"along": [_below(chart, axis, k) for k, axis in enumerate(chart.over)]} if chart.over else {}
    choices |= {"behind": _behind(x, y)} if chart.smooth else {}
    return (
        spec
        | {"data": {"name": "series"}, "transform": _points(chart.smooth)}
        | ({"usermeta": choices} if choices else {})
    )


def _line(chart: Lines, x: vl.Spec, y: vl.Place) -> vl.Spec:
    names = {one.name: one.colour for one in chart.series}
    dashes = {"domain": list(names), "range": [[6, 4] if one.dash else [1, 0] for one in chart.series]}
    return {
        "mark": {"type": "line", "strokeWidth": 2, "strokeJoin": "round", "xOffset": {"expr": "datum.aside"}},
        "encoding": {
            "x": x,
            "y": y("y"),
            "color": vl.colour("name", names),
            "strokeDash": {**NAME, "scale": dashes, "legend": vl.legend(list(names))},
        },
    }


def _behind(x: vl.Spec, y: vl.Place) -> vl.Spec:
    """The values themselves, where the line is a mean of them."""
    return {
        "mark": {"type": "line", "strokeWidth": 1, "opacity": 0.4, "color": OWN},
        "encoding": {"x": x, "y": y("behind"), "detail": NAME},
    }


def _band(x: vl.Spec, y: vl.Place) -> vl.Spec:
    return {
        "mark": {"type": "area", "opacity": 0.15, "color": OWN},
        "encoding": {"x": x, "y": y("band_low"), "y2": {"field": "band_high"}, "detail": NAME},
    }


def _cursor() -> vl.Spec:
    """Where the reader is."""
    return {
        "data": {"values": [{}]},
        "transform": [vl.keep("at !== null")],
        "mark": {"type": "rule", "color": vl.ink("faint")},
        "encoding": {"x": {"value": {"expr": "scale('x', at)"}}},
    }


def _marked() -> vl.Spec:
    """Marks at the points of short lines, and larger ones where the reader is."""
    own = vl.lookup("about", "name")
    return {
        "transform": [vl.keep(f"isValid(datum.y) && ({own}.marked || datum.x === at)")],
        "mark": {
            "type": "point",
            "filled": True,
            "opacity": 1,
            "color": OWN,
            "stroke": vl.ink("page"),
            "strokeWidth": 1,
            "shape": {"expr": f"{own}.shape"},
            "size": {"expr": f"(datum.x === at ? 2 : 1) * {own}.size"},
            "x": {"expr": "scale('x', datum.x) + datum.aside"},
            "y": {"expr": "scale('y', datum.y)"},
        },
        "encoding": {},
    }


def shape(one: Series) -> str:
    number = one.colour[1:]
    return list(SIZES)[int(number) % len(SIZES)] if number.isdigit() else "circle"


def _channels(chart: Lines) -> tuple[vl.Spec, vl.Place, str]:
    """Both axes, and the title of the upright one, which stands above it."""
    ys = [value for one in chart.series for value in (*one.y, *one.low, *one.high)]
    named = any(one.texts for one in chart.series) and not chart.y.log
    whole = (chart.y.unit in FROM_ZERO and not chart.y.log) or (named and vl.from_zero(ys))
    room = {"zero": True, "nice": True} if whole else {"padding": 10}
    y = partial(vl.place, axis=vl.upright(chart.y, ys), scale=vl.scale_of(chart.y, **room))
    return _below(chart, chart.x), y, vl.unit_name(chart.y, ys)[1]


def _below(chart: Lines, axis: Axis, other: int | None = None) -> vl.Spec:
    """The channel of the chart's own x axis, or of one of the others."""
    named = any(one.texts for one in chart.series)
    places = (one.x if other is None else one.over[other] for one in chart.series)
    xs = [value for place in places for value in place]
    drawn = vl.below(axis, xs, 44 if axis.unit == "count" else 66, grid=False, titlePadding=6)
    return vl.place("x", drawn, vl.scale_of(axis, padding=30 if named else 8))


def _about(chart: Lines, one: Series) -> dict[str, Any]:
    """How a line is drawn: whether its intervals are bars at its points or a band, whether its points are marked."""
    # Roles are shown and hidden together, so those of one role keep apart from each other.
    beside = [each.name for each in chart.series if _barred(each) and each.role == one.role]
    return {
        "barred": _barred(one),
        "banded": bool(one.low) and not _barred(one),
        "marked": len(one.x) == 1 or (len(one.x) <= MARKED_UP_TO and one.colour != "faint" and one.role != "ranks"),
        "aside": APART * (beside.index(one.name) - (len(beside) - 1) / 2) if _barred(one) else 0,
        "shape": shape(one),
        "size": SIZES[shape(one)],
    }


def _barred(one: Series) -> bool:
    return bool(one.low and (one.texts or len(one.x) == 1))


def _points(smooth: bool) -> list[vl.Spec]:
    """From lines to their points; those that are switched off are left out, so that the axes fit what is seen."""
    lists = ("low", "high", "texts", *(["behind"] if smooth else []))

    def either(kind: str, field: str) -> vl.Spec:
        """Where there is no such interval it has no width, so that it changes no axis."""
        is_so = f"{vl.lookup('about', 'name')}.{kind}ed && isValid(datum.{field})"
        return {"calculate": f"{is_so} ? datum.{field} : datum.y", "as": f"{kind}_{field}"}

    return [
        vl.SHOWN,
        *({"calculate": f"datum.{name} || []", "as": name} for name in lists),
        {"flatten": ["x", "y", *lists]},
        vl.keep("isValid(datum.x)"),
        {"calculate": f"isValid(datum.low) ? {vl.lookup('about', 'name')}.aside : 0", "as": "aside"},
        either("band", "low"),
        either("band", "high"),
        either("barr", "low"),
        either("barr", "high"),
    ]


def _intervals(x: vl.Spec, y: vl.Place) -> list[vl.Spec]:
    moved = {
        "color": OWN,
        "xOffset": {"expr": "datum.aside"},
        "opacity": {"expr": "datum.barr_low < datum.barr_high ? 0.75 : 0"},
    }
    end: vl.Spec = {"type": "tick", "orient": "horizontal", "size": 10, "thickness": 1.4, **moved}
    return [
        {
            "mark": {"type": "rule", "strokeWidth": 1.4, **moved},
            "encoding": {"x": x, "y": y("barr_low"), "y2": {"field": "barr_high"}},
        },
        *({"mark": end, "encoding": {"x": x, "y": y(field)}} for field in ("barr_low", "barr_high")),
    ]


def _marks(chart: Lines, x: vl.Spec) -> list[vl.Spec]:
    """A dashed line at each marked place, and its words above the plot, one line for each."""
    if not chart.marks:
        return []
    last = len(chart.marks) - 1
    rows = [
        {"x": mark.x, "text": mark.text, "colour": mark.colour, "high": -6 - LINE_HEIGHT * (last - number)}
        | ({"over": mark.over} if mark.over else {})
        for number, mark in enumerate(chart.marks)
    ]
    # The words stay within the plot: they begin, end or are centred at their place.
    side = "scale('x', datum.x) / width"
    return [
        {
            "data": {"values": rows},
            "mark": {
                "type": "rule",
                "color": OWN,
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
                "color": OWN,
                "fontSize": vl.PLAIN,
                "fontWeight": 600,
                "baseline": "alphabetic",
                "align": {"expr": f"{side} < 0.35 ? 'left' : {side} > 0.65 ? 'right' : 'center'"},
                "limit": {"expr": "width * 0.9"},
                "y": {"expr": "datum.high"},
            },
            "encoding": {"x": x, "text": {"field": "text", "type": "nominal"}},
        },
    ]
