"""The plots of a report as files for papers, drawn from the same views as the page's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.report import draw_bars, draw_lines
from lockstep.report.canvas import Canvas, Png, Svg, text_width
from lockstep.report.views import AnyChart, Bars, Lines, Scatter, Timeline, Waterfall

WIDTH, EDGE = 760.0, 20.0


@dataclass(frozen=True)
class Key:
    """One entry of a legend."""

    name: str
    colour: str
    dash: bool = False
    block: bool = False


def svg(chart: AnyChart) -> str:
    canvas = Svg()
    height = _all(chart, canvas)
    return canvas.finish(WIDTH, height)


def png(chart: AnyChart, path: Path) -> None:
    canvas = Png(WIDTH, _all(chart, Svg()))
    _all(chart, canvas)
    canvas.save(path)


def _all(chart: AnyChart, canvas: Canvas) -> float:
    """Title, legend, plot; returns the height."""
    canvas.text((EDGE, 30), chart.title, size=16, bold=True)
    top = _legend(canvas, legend(chart), 54) + 10
    inside = (EDGE, top, WIDTH - EDGE)
    if isinstance(chart, Lines):
        return draw_lines.lines(chart, canvas, inside)
    if isinstance(chart, Scatter):
        return draw_lines.scatter(chart, canvas, inside)
    if isinstance(chart, Bars):
        return draw_bars.bars(chart, canvas, inside)
    if isinstance(chart, Waterfall):
        return draw_bars.waterfall(chart, canvas, inside)
    return draw_bars.timeline(chart, canvas, inside)


def legend(chart: AnyChart) -> list[Key]:
    if isinstance(chart, Lines):
        return [Key(one.name, one.colour, one.dash) for one in draw_lines.shown(chart)]
    if isinstance(chart, Scatter):
        return [Key(dot.name, dot.colour, block=True) for dot in chart.dots]
    if isinstance(chart, Bars):
        used = [part for place, part in enumerate(chart.parts) if any(row.values[place] for row in chart.rows)]
        return [Key(part, part, block=True) for part in used]
    if isinstance(chart, Waterfall):
        saves = any(not row.total and row.value < 0 for row in chart.rows)
        names = [("time of a step", "c0"), ("adds to it", "c1"), *([("saves", "c2")] if saves else [])]
        return [Key(name, colour, block=True) for name, colour in names]
    assert isinstance(chart, Timeline)
    seen = {span.part for lane in chart.lanes for span in lane.spans}
    return [Key(part, part, block=True) for place, part in enumerate(chart.parts) if place in seen]


def _legend(canvas: Canvas, keys: Sequence[Key], y: float) -> float:
    x = EDGE
    for key in keys:
        wide = 28 + text_width(key.name) + 16
        if x + wide > WIDTH - EDGE and x > EDGE:
            x, y = EDGE, y + 20
        if key.block:
            draw_bars.rect(canvas, (x + 5, y - 9), 11, 11, key.colour)
        else:
            canvas.line([(x, y - 4), (x + 21, y - 4)], key.colour, 2, key.dash)
        canvas.text((x + 27, y), key.name, "muted")
        x += wide
    return y
