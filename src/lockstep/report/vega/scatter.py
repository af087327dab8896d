"""Circles between two axes: their area is a third measure."""

from __future__ import annotations

from functools import partial

from lockstep.report.vega import common as vl
from lockstep.report.views import Scatter

# Areas of circles, in square dots: the largest, the least, and where the measure is not known.
LARGEST, LEAST, UNKNOWN = 1250, 80, 150
# More circles than this have no names beside them.
MOST_NAMES = 12


def scatter(chart: Scatter) -> vl.Spec:
    xs = [value for dot in chart.dots for value in (dot.x, dot.x_low, dot.x_high)]
    ys = [value for dot in chart.dots for value in (dot.y, dot.y_low, dot.y_high)]
    below, upright = vl.below(chart.x, xs, 80, grid=False, titlePadding=6), vl.upright(chart.y, ys)
    # Room for the circles beyond the outermost values.
    x = partial(vl.place, axis=below, scale=vl.scale_of(chart.x, padding=26))
    y = partial(vl.place, axis=upright, scale=vl.scale_of(chart.y, padding=26))
    names = vl.colour("name", {dot.name: dot.colour for dot in chart.dots})
    interval = {"type": "rule", "strokeWidth": 1.4, "opacity": 0.75, "color": {"expr": vl.lookup("palette", "colour")}}
    layers: list[vl.Spec] = [
        {
            "name": "across",
            "mark": interval,
            "encoding": {"x": x("left"), "x2": {"field": "right"}, "y": y("y")},
        },
        {
            "name": "upright",
            "mark": interval,
            "encoding": {"x": x("x"), "y": y("bottom"), "y2": {"field": "top"}},
        },
        {
            "name": "circles",
            "mark": {
                "type": "point",
                "shape": "circle",
                "filled": True,
                "opacity": 1,
                "fillOpacity": {"expr": "datum.name === at ? 0.6 : 0.35"},
                "stroke": {"expr": vl.lookup("palette", "colour")},
                "strokeWidth": {"expr": "datum.name === at ? 3 : 1.6"},
            },
            "encoding": {
                "x": x("x"),
                "y": y("y"),
                "color": names,
                "size": {"field": "area", "type": "quantitative", "scale": None, "legend": None},
                "order": {"field": "area", "type": "quantitative", "sort": "descending"},
            },
        },
    ]
    spec = vl.base(
        chart,
        layers,
        vl.unit_name(chart.y, ys)[1],
        named=list(dict.fromkeys(dot.name for dot in chart.dots)),
        largest=max((dot.size or 0.0 for dot in chart.dots), default=0.0),
    )
    area = f"datum.size && largest ? max({LEAST}, {LARGEST} * datum.size / largest) : {UNKNOWN}"
    return spec | {
        "data": {"name": "dots"},
        "transform": [vl.SHOWN, {"calculate": area, "as": "area"}, *_intervals()],
        "usermeta": {"marks": [_names()] if len(chart.dots) <= MOST_NAMES else []},
    }


def _intervals() -> list[vl.Spec]:
    """Where there is none (a run that was made once) it has no width: an axis without values lies anywhere, and names avoid marks that must be there."""
    ends = {"left": ("x_low", "x"), "right": ("x_high", "x"), "bottom": ("y_low", "y"), "top": ("y_high", "y")}
    return [
        {"calculate": f"isValid(datum.{end}) ? datum.{end} : datum.{middle}", "as": name}
        for name, (end, middle) in ends.items()
    ]


def _names() -> vl.Spec:
    """Beside their circles, where no other circle or name is. Vega-Lite has no word for it, so the page adds this mark to Vega's form of
    the spec; it needs a canvas, which only browsers have, so files have the names in their legend alone."""
    sides = ("top-right", "top-left", "bottom-right", "bottom-left", "right", "left")
    return {
        "type": "text",
        "name": "names",
        "interactive": False,
        "from": {"data": "circles_marks"},
        "encode": {
            "update": {
                "text": {"field": "datum.name"},
                "fontSize": {"value": vl.SMALL},
                "limit": {"value": 170},
                "fill": {"signal": "palette['ink']"},
            }
        },
        "transform": [
            {
                "type": "label",
                "size": {"signal": "[max(1, width), max(1, height)]"},
                "anchor": list(sides),
                "offset": [3],
                "padding": 0,
                "avoidMarks": ["across_marks", "upright_marks"],
            }
        ],
    }
