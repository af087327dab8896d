"""Bars, one a row: stacked, and falling."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from lockstep.report.vega import common as vl
from lockstep.report.views import Bars, Waterfall
from lockstep.units import text

# The least width of a stretch of a bar that has its share written on it.
SHARE_WIDTH = 36
# Longer names than this stand above their bars on every page: beside them they would be cut.
LONG_NAME = 34
FALLS = {"time of a step": "c0", "adds to it": "c1", "saves": "c2"}


def bars(chart: Bars, on_phone: bool) -> vl.Spec:
    narrow = names_above([row.name for row in chart.rows], on_phone)
    most = max((sum(row.values) for row in chart.rows), default=0.0)
    room = room_for([text(most, chart.x.unit)])
    x, y = _x(chart, [0.0, most], room), rows(narrow, on_phone)
    part = vl.colour("part", {name: name for name in chart.parts})
    wide = "scale('x', datum.end) - scale('x', datum.begin)"
    share = "format(100 * datum.value / datum.total, '.0f') + ' %'"
    layers: list[vl.Spec] = [
        here(y),
        {
            "mark": {"type": "bar", "height": _thick(narrow), "stroke": vl.ink("page"), "strokeWidth": 0.6},
            "encoding": {"y": y, "x": x("begin"), "x2": {"field": "end"}, "color": part},
        },
        {
            "mark": {
                "type": "text",
                "fontSize": vl.SMALL,
                "fontWeight": 600,
                "color": {"expr": "palette['on-' + datum.part]"},
                "text": {"expr": f"{wide} > {SHARE_WIDTH} ? {share} : ''"},
            },
            "encoding": {"y": y, "x": x("middle")},
        },
        {
            "transform": [{"aggregate": [{"op": "max", "field": "end", "as": "end"}], "groupby": ["name"]}],
            "mark": beside({"text": {"expr": vl.written("datum.end", chart.x.unit)}}),
            "encoding": {"y": y, "x": x("end")},
        },
    ]
    used = [name for place, name in enumerate(chart.parts) if any(row.values[place] for row in chart.rows)]
    spec = vl.base(chart, layers, gone=chart.hidden, named=used, parts=chart.parts)
    shown = sum(row.role not in chart.hidden for row in chart.rows)
    return spec | {"data": {"name": "rows"}, "transform": _stacked(), **height(shown, narrow)}


def _stacked() -> list[vl.Spec]:
    """From bars to their stretches, without those that are switched off."""
    return [
        vl.keep("indexof(gone, datum.role || '-') < 0"),
        {"calculate": "parts", "as": "parts"},
        {"flatten": ["parts", "values"], "as": ["part", "value"]},
        vl.keep("datum.value > 0 && indexof(off, datum.part) < 0"),
        {"calculate": "indexof(parts, datum.part)", "as": "order"},
        {"stack": "value", "groupby": ["name"], "sort": [{"field": "order"}], "as": ["begin", "end"]},
        {"joinaggregate": [{"op": "sum", "field": "value", "as": "total"}], "groupby": ["name"]},
        {"calculate": "(datum.begin + datum.end) / 2", "as": "middle"},
    ]


def waterfall(chart: Waterfall, on_phone: bool) -> vl.Spec:
    narrow = names_above([row.name for row in chart.rows], on_phone)
    ends, reached = [0.0], 0.0
    for row in chart.rows:
        reached = row.value if row.total else reached + row.value
        ends.append(reached)
    x, y = _x(chart, ends, room_for([row.text for row in chart.rows])), rows(narrow, on_phone)
    saves = any(not row.total and row.value < 0 for row in chart.rows)
    kinds = {name: shade for name, shade in FALLS.items() if saves or name != "saves"}
    layers: list[vl.Spec] = [
        here(y),
        {
            "mark": {"type": "bar", "height": _thick(narrow)},
            "encoding": {"y": y, "x": x("begin"), "x2": {"field": "end"}, "color": vl.colour("kind", kinds)},
        },
        {
            "transform": [vl.keep("isValid(datum.next)")],
            "mark": {
                "type": "rule",
                "color": vl.ink("faint"),
                "strokeDash": [2, 2],
                "y": {"expr": f"scale('y', datum.name) + bandwidth('y') / 2 + {_thick(narrow) / 2}"},
                "y2": {"expr": f"scale('y', datum.next) + bandwidth('y') / 2 - {_thick(narrow) / 2}"},
            },
            "encoding": {"x": x("end")},
        },
        {
            "mark": beside({"text": {"expr": "datum.text"}}),
            "encoding": {"y": y, "x": x("right")},
        },
    ]
    spec = vl.base(chart, layers, named=list(kinds))
    return spec | {"data": {"name": "rows"}, "transform": _fallen(), **height(len(chart.rows), narrow)}


def _fallen() -> list[vl.Spec]:
    """Where each bar begins and ends. A total starts anew, and what follows adds to it."""
    return [
        {"calculate": "datum.total ? 1 : 0", "as": "totals"},
        {"window": [{"op": "sum", "field": "totals", "as": "group"}]},
        {"window": [{"op": "sum", "field": "value", "as": "end"}], "groupby": ["group"]},
        {"window": [{"op": "lead", "field": "name", "as": "next"}]},
        {"calculate": "datum.total ? 0 : datum.end - datum.value", "as": "begin"},
        {"calculate": "max(datum.begin, datum.end)", "as": "right"},
        {"calculate": "datum.total ? 'time of a step' : datum.value < 0 ? 'saves' : 'adds to it'", "as": "kind"},
    ]


def _x(chart: Bars | Waterfall, values: list[float], room: float) -> vl.Place:
    axis = vl.below(chart.x, values, 90, grid=True, domain=False, ticks=False)
    # Text stands to the right of the longest bar.
    scale = vl.scale_of(chart.x, zero=True, range=[0, {"expr": f"width - {room:.0f}"}])
    return partial(vl.place, axis=axis, scale=scale)


def room_for(words: list[str]) -> float:
    return 14 + 6.8 * max((len(each) for each in words), default=0)


def _thick(narrow: bool) -> int:
    return 18 if narrow else 20


def height(count: int, narrow: bool) -> vl.Spec:
    """Of all rows; the page asks for that of one when it shows more or fewer of them."""
    step = 48 if narrow else 32
    return {"height": step * count, "usermeta": {"step": step}}


def names_above(names: Sequence[str], on_phone: bool) -> bool:
    return on_phone or max(map(len, names), default=0) > LONG_NAME


def rows(narrow: bool, on_phone: bool) -> vl.Spec:
    """Names to the left of their bars; on a phone, and where they are long, above them."""
    axis: vl.Spec = {
        "title": None,
        "domain": False,
        "ticks": False,
        "labelColor": vl.ink("ink"),
        "labelPadding": 8,
        "labelLimit": int(vl.WIDTH * 0.34),
        "labelOverlap": False,
    }
    if narrow:
        axis |= {
            "labelAlign": "left",
            "labelPadding": 0,
            "labelOffset": -18,
            "labelLimit": 330 if on_phone else vl.WIDTH,
        }
    return {"field": "name", "type": "nominal", "sort": None, "title": None, "axis": axis, "scale": {"padding": 0}}


def here(y: vl.Spec) -> vl.Spec:
    """The row that the reader is at."""
    return {
        "transform": [
            vl.keep("datum.name === at"),
            {"aggregate": [{"op": "count", "as": "count"}], "groupby": ["name"]},
        ],
        "mark": {"type": "rect", "color": vl.ink("ink"), "opacity": 0.07},
        "encoding": {"y": y},
    }


def beside(more: vl.Spec) -> vl.Spec:
    return {"type": "text", "align": "left", "dx": 6, "fontSize": vl.PLAIN, "color": vl.ink("muted"), **more}
