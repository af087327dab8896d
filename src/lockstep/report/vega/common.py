"""What all specs share: colours by name, what the reader can switch, axes, legend, and how numbers are written in expressions.

A spec holds no data: it names the part of the chart that they are (`series`, `rows` …), which is given to it beside the spec. What
the page changes while it is looked at are parameters:

    palette   colours by name: light or dark
    off       names that the legend has switched off
    gone      roles that the checkboxes have switched off
    named     names that the legend of a saved plot lists
    at        where the reader is: the pointer, or the arrow keys
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from lockstep.report.views import AnyChart, Axis
from lockstep.units import UNITS, scale

Spec = dict[str, Any]
Place = Callable[[str], Spec]
"""From the name of a field to its channel."""
WIDTH = 760
HEIGHT = 240
FONT = "system-ui, -apple-system, Segoe UI, Roboto, Helvetica Neue, Arial, Liberation Sans, DejaVu Sans, sans-serif"
SMALL, PLAIN, LARGE = 11, 12, 16


@cache
def palette(theme: Literal["light", "dark"]) -> dict[str, str]:
    """Colours by name, from the page's style: the first block is light, the second dark."""
    style = files("lockstep.report").joinpath("page", "page.css").read_text(encoding="utf-8")
    block = style.split("}")[0 if theme == "light" else 1]
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))


def ink(name: str) -> Spec:
    return {"expr": f"palette['{name}']"}


def base(
    chart: AnyChart,
    layers: Sequence[Spec],
    above: str = "",
    off: Sequence[str] = (),
    gone: Sequence[str] = (),
    named: Sequence[str] = (),
    **more: Any,
) -> Spec:
    """A spec as it is saved; the page takes the title and the legend away, which it has in its own form."""
    values = {
        "palette": palette("light"),
        "off": list(off),
        "gone": list(gone),
        "named": list(named),
        "at": None,
        **more,
    }
    return {
        "description": f"{chart.title}. {chart.says}",
        "title": {
            "text": chart.title,
            "subtitle": above,
            "anchor": "start",
            "frame": "bounds",
            "offset": 10,
            "fontSize": LARGE,
            "fontWeight": 700,
            "color": ink("ink"),
            "subtitleFontSize": PLAIN,
            "subtitleFontWeight": 600,
            "subtitleColor": ink("muted"),
            "subtitlePadding": 8,
        },
        "width": WIDTH,
        "height": HEIGHT,
        "padding": 12,
        "background": ink("page"),
        "autosize": {"type": "fit-x", "contains": "padding"},
        "params": [{"name": name, "value": value} for name, value in values.items()],
        "layer": list(layers),
        "config": {
            "font": FONT,
            "view": {"stroke": None},
            "mark": {"aria": False},
            "axis": {"labelFontSize": PLAIN, "titleFontSize": PLAIN, "titleFontWeight": 600},
            "legend": {"labelFontSize": PLAIN},
        },
    }


def lookup(table: str, key: str) -> str:
    """An expression for the entry of a parameter that is a table by name."""
    return f"{table}[datum.{key}]"


# ---------------------------------------------------------------- numbers


def written(value: str, unit: str) -> str:
    """An expression that writes a number with its unit, as `units.text` does."""
    return _by_size(value, unit, f",.{UNITS[unit].digits}r")


def _by_size(value: str, unit: str, form: str) -> str:
    found = ""
    for least, factor, name in UNITS[unit].steps:
        words = f"format({value} / {factor!r}, '{form}') + ' {name}'"
        found += f"abs({value}) >= {least!r} ? {words} : " if least else words
    return found or f"format({value}, '{form}')"


def extent(values: Iterable[float | None], log: bool = False) -> tuple[float, float]:
    known = [value for value in values if value is not None and not (log and value <= 0)]
    return (min(known), max(known)) if known else (1.0, 10.0)


def unit_name(axis: Axis, values: Iterable[float | None]) -> tuple[float, str]:
    """What an axis's numbers are divided by, and its title."""
    if axis.log:
        return 1.0, axis.label
    factor, name = scale(axis.unit, max(map(abs, extent(values))))
    return factor, f"{axis.label}, {name}" if name and name != "×" else axis.label


def axis_of(axis: Axis, values: Iterable[float | None], **more: Any) -> Spec:
    """Numbers in one unit, which the title names; on a logarithmic axis, powers with their units."""
    known = list(values)
    factor, _ = unit_name(axis, known)
    found: Spec = {
        "title": None,
        "domainColor": ink("faint"),
        "tickColor": ink("faint"),
        "gridColor": ink("rule"),
        "labelColor": ink("muted"),
        "titleColor": ink("muted"),
        "labelOverlap": "greedy",
        **more,
    }
    if axis.ticks:
        found |= {"values": axis.ticks, "labelExpr": _by_size("datum.value", axis.unit, ",.4~r")}
    elif axis.log:
        found |= {
            "values": powers(*extent(known, log=True), _root(axis)),
            "labelExpr": _by_size("datum.value", axis.unit, ",.3~r"),
        }
    elif axis.unit == "count":
        found |= {"values": whole(*extent(known)), "labelExpr": "format(datum.value, ',.0f')"}
    else:
        found |= {"labelExpr": _label(factor)}
    return found


def below(axis: Axis, values: Iterable[float | None], apart: int, **more: Any) -> Spec:
    """The axis below a plot: a mark every N dots at most, and its title at the end. Vega leaves out every other mark until they fit."""
    known = list(values)
    _, title = unit_name(axis, known)
    count = {"expr": f"max(2, floor(width / {apart}))"}
    return axis_of(axis, known, tickCount=count, title=title, titleAnchor="end", **more)


def upright(axis: Axis, values: Iterable[float | None]) -> Spec:
    """The axis beside a plot: lines across it, and no title, which stands above."""
    return axis_of(axis, values, grid=True, tickCount=5, domain=False, ticks=False, labelPadding=6)


def _label(factor: float) -> str:
    """A mark's text. Vega's own text of it has as many places as all marks of the axis need; dividing moves the point."""
    if factor > 1:
        return f"format(datum.value / {factor!r}, ',.9~r')"
    places = f"length(split(datum.label, '.')[1] || '') - {round(-math.log10(factor))}"
    return f"format(datum.value / {factor!r}, ',.' + max(0, {places}) + 'f')"


def from_zero(values: Iterable[float | None]) -> bool:
    """Whether an axis begins at zero: where values differ so much that all of them can be told apart on it."""
    low, high = extent(values)
    return 0 <= low < 0.8 * high


def scale_of(axis: Axis, **more: Any) -> Spec:
    kind: Spec = {"type": "log", "base": _root(axis)} if axis.log else {"zero": False}
    return {**kind, "nice": False, **more}


def _root(axis: Axis) -> int:
    return 2 if axis.unit == "binary" else 10


def powers(low: float, high: float, root: int) -> list[float]:
    """Powers of a root, at most seven; of ten also their doubles and fives, where there are few."""
    if root == 10 and high < 30 * low:
        near = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        return [found for power in near for part in (1, 2, 5) if low <= (found := part * 10.0**power) <= high]
    first, last = math.ceil(math.log(low, root) - 1e-9), math.floor(math.log(high, root) + 1e-9)
    return [float(root) ** power for power in range(first, last + 1, max(1, math.ceil((last - first) / 6)))]


def whole(low: float, high: float) -> list[int]:
    """Round whole numbers, at most a dozen."""
    step = next(
        size * 10**power for power in range(16) for size in (1, 2, 5) if (high - low) / (size * 10**power) <= 12
    )
    return list(range(step * math.ceil(low / step), math.floor(high) + 1, step))


# ---------------------------------------------------------------- channels


def place(field: str, axis: Spec | None, scale: Spec) -> Spec:
    return {"field": field, "type": "quantitative", "title": None, "axis": axis, "scale": scale}


def colour(field: str, colours: Mapping[str, str]) -> Spec:
    """Colours by name; the legend lists those of `named`."""
    return {
        "field": field,
        "type": "nominal",
        "title": None,
        "scale": {"domain": list(colours), "range": [ink(name) for name in colours.values()]},
        "legend": legend(list(colours)),
    }


def legend(names: Sequence[str]) -> Spec:
    """Below the plot, in as many columns as their names leave room for."""
    widest = max((len(name) for name in names), default=1)
    return {
        "orient": "bottom",
        "direction": "horizontal",
        "columns": max(1, int(WIDTH / (7 * min(widest, 100) + 45))),
        "values": {"expr": "named"},
        "labelColor": ink("muted"),
        "labelLimit": WIDTH - 60,
        "symbolSize": 160,
        "symbolStrokeWidth": 2,
        "rowPadding": 5,
        "columnPadding": 14,
        "offset": 12,
    }


def keep(condition: str) -> Spec:
    return {"filter": condition}


SHOWN = keep("indexof(off, datum.name) < 0 && indexof(gone, datum.role || '-') < 0")
