"""Lines and bubbles between two axes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from lockstep.report.axes import Ends, extent, marks, padded, placed
from lockstep.report.canvas import Canvas, Point, text_width
from lockstep.report.views import Axis, Dot, Lines, Scatter, Series

HIGH = 300.0
MARKED_UP_TO = 30
Inside = tuple[float, float, float]
"""Left, top and right of what a plot may use."""


@dataclass(frozen=True)
class Plot:
    left: float
    right: float
    top: float
    bottom: float
    x: Callable[[float], float]
    y: Callable[[float], float]
    end: float


def shown(chart: Lines) -> list[Series]:
    return [one for one in chart.series if one.shown and one.role not in chart.hidden]


def axes(
    canvas: Canvas, inside: Inside, x: Axis, y: Axis, x_ends: Ends, y_ends: Ends, extra: float = 0.0, inset: float = 0.0
) -> Plot:
    """The empty plot."""
    begin, top, right = inside
    beside = marks(y, y_ends, 6)
    left = begin + max([text_width(text) for text in beside.texts], default=14.0) + 12
    plot_top, bottom = top + 26 + extra, top + 26 + extra + HIGH - 68
    below = marks(x, x_ends, max(2, int((right - left) / 70)))
    across, up = (
        placed(x_ends, left + inset, right - inset, x.log),
        placed(y_ends, bottom - inset, plot_top + inset, y.log),
    )
    plot = Plot(left, right, plot_top, bottom, across, up, bottom + 42)
    canvas.text((begin, top + 13), beside.title, "muted", bold=True)
    for value, text in zip(beside.values, beside.texts, strict=True):
        canvas.line([(left, plot.y(value)), (right, plot.y(value))], "rule")
        canvas.text((left - 8, plot.y(value) + 4), text, "muted", anchor="end")
    canvas.line([(left, bottom), (right, bottom)], "faint")
    for value, text in zip(below.values, below.texts, strict=True):
        canvas.line([(plot.x(value), bottom), (plot.x(value), bottom + 4)], "faint")
        canvas.text((plot.x(value), bottom + 18), text, "muted", anchor="middle")
    canvas.text((right, bottom + 36), below.title, "muted", anchor="end", bold=True)
    return plot


def lines(chart: Lines, canvas: Canvas, inside: Inside) -> float:
    chosen = shown(chart)
    x_ends = extent(chain.from_iterable(one.x for one in chosen), chart.x)
    values = chain.from_iterable((*one.y, *one.low, *one.high) for one in chosen)
    y_ends = padded(extent(values, chart.y, from_zero=chart.y.unit == "times"), chart.y, 0.05)
    flags = [mark for mark in chart.marks if x_ends[0] <= mark.x <= x_ends[1]]
    plot = axes(
        canvas,
        inside,
        chart.x,
        chart.y,
        padded(x_ends, chart.x, 0.08 if any(one.texts for one in chosen) else 0.02),
        y_ends,
        15.0 * len(flags),
    )
    for number, mark in enumerate(flags):
        at, high = plot.x(mark.x), plot.top - 5 - 15 * (len(flags) - 1 - number)
        wide = text_width(mark.text) * 1.08  # it is bold
        left = max(inside[0], min(at - wide / 2, inside[2] - wide))
        canvas.line([(at, high + 4), (at, plot.bottom)], mark.colour, 1.4, dash=True)
        canvas.text((left, high), mark.text, mark.colour, bold=True)
    # Intervals of one place stand beside each other, not upon each other.
    beside = [one for one in chosen if _barred(one)]
    for one in chosen:
        _series(canvas, plot, one, (beside.index(one) - (len(beside) - 1) / 2) * 8 if one in beside else 0.0)
    return plot.end


def _barred(one: Series) -> bool:
    """Whether its intervals are drawn as bars at its points instead of a band."""
    return bool(one.low and (one.texts or len(one.x) == 1))


def _series(canvas: Canvas, plot: Plot, one: Series, aside: float) -> None:
    band = [
        (plot.x(x) + aside, plot.y(low), plot.y(high))
        for x, low, high in zip(one.x, one.low, one.high, strict=False)
        if x is not None and low is not None and high is not None
    ]
    if _barred(one):
        for x, low, high in band:
            for ends in ([(x, low), (x, high)], [(x - 5, low), (x + 5, low)], [(x - 5, high), (x + 5, high)]):
                canvas.line(ends, one.colour, 1.4)
    elif len(band) > 1:
        canvas.area([(x, high) for x, _, high in band] + [(x, low) for x, low, _ in reversed(band)], one.colour, 0.15)
    piece: list[Point] = []
    for place, (x_value, y_value) in enumerate([*zip(one.x, one.y, strict=True), (None, None)]):
        if x_value is not None and y_value is not None:
            moved = aside if _barred(one) and place < len(one.low) and one.low[place] is not None else 0.0
            piece.append((plot.x(x_value) + moved, plot.y(y_value)))
            continue
        if len(piece) > 1:
            canvas.line(piece, one.colour, 1.7 if one.dash else 2.0, one.dash)
        if len(one.x) <= MARKED_UP_TO and one.colour != "faint":
            for point in piece:
                canvas.circle(point, 3.2, one.colour)
        piece = []


def scatter(chart: Scatter, canvas: Canvas, inside: Inside) -> float:
    xs = chain.from_iterable((dot.x, dot.x_low, dot.x_high) for dot in chart.dots)
    ys = chain.from_iterable((dot.y, dot.y_low, dot.y_high) for dot in chart.dots)
    x_ends, y_ends = padded(extent(xs, chart.x), chart.x, 0.04), padded(extent(ys, chart.y), chart.y, 0.04)
    plot = axes(canvas, inside, chart.x, chart.y, x_ends, y_ends, inset=22)
    largest = max((dot.size for dot in chart.dots if dot.size), default=0.0)
    for dot in sorted(chart.dots, key=lambda dot: -(dot.size or 0.0)):
        _bubble(canvas, plot, dot, max(5.0, 20 * (dot.size / largest) ** 0.5) if largest and dot.size else 7.0)
    return plot.end


def _bubble(canvas: Canvas, plot: Plot, dot: Dot, radius: float) -> None:
    x, y = plot.x(dot.x), plot.y(dot.y)
    if dot.x_low is not None and dot.x_high is not None:
        canvas.line([(plot.x(dot.x_low), y), (plot.x(dot.x_high), y)], dot.colour, 1.4)
    if dot.y_low is not None and dot.y_high is not None:
        canvas.line([(x, plot.y(dot.y_low)), (x, plot.y(dot.y_high))], dot.colour, 1.4)
    canvas.circle((x, y), radius, dot.colour, 0.45)
