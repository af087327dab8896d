"""Bars: stacked, falling, and along a time axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lockstep.report.axes import marks, placed
from lockstep.report.canvas import Canvas, Point, text_width
from lockstep.report.units import text
from lockstep.report.views import Axis, Bars, Timeline, Waterfall

Inside = tuple[float, float, float]


def rect(canvas: Canvas, at: Point, width: float, height: float, colour: str) -> None:
    x, y = at
    canvas.area([(x, y), (x + width, y), (x + width, y + height), (x, y + height)], colour)


def cut(words: str, room: float) -> str:
    """As much of a name as fits."""
    if text_width(words) <= room:
        return words
    while len(words) > 1 and text_width(words + "…") > room:
        words = words[:-1]
    return words.rstrip() + "…"


def _axis(
    canvas: Canvas, axis: Axis, high: float, left: float, right: float, top: float, bottom: float
) -> Callable[[float], float]:
    found = marks(axis, (0.0, high), max(2, int((right - left) / 90)))
    x = placed((0.0, high), left, right)
    for value, words in zip(found.values, found.texts, strict=True):
        canvas.line([(x(value), top), (x(value), bottom)], "rule")
        canvas.text((x(value), bottom + 16), words, "muted", anchor="middle")
    canvas.text((right, bottom + 34), found.title, "muted", anchor="end", bold=True)
    return x


def _left(names: Sequence[str], inside: Inside) -> float:
    widest = max([text_width(name) for name in names], default=20.0)
    return inside[0] + min(widest + 14, (inside[2] - inside[0]) * 0.34)


def bars(chart: Bars, canvas: Canvas, inside: Inside) -> float:
    rows = [row for row in chart.rows if row.role not in chart.hidden]
    left, top = _left([row.name for row in rows], inside), inside[1] + 6
    most = max([sum(row.values) for row in rows], default=0.0) or 1e-12
    bottom = top + 32 * len(rows)
    x = _axis(canvas, chart.x, most, left, inside[2] - text_width(text(most, chart.x.unit)) - 14, top - 4, bottom)
    for number, row in enumerate(rows):
        y, at = top + 32 * number + 2, 0.0
        canvas.text((left - 8, y + 14), cut(row.name, left - inside[0] - 12), anchor="end")
        for part, value in zip(chart.parts, row.values, strict=True):
            begin, end = x(at), x(at + value)
            at += value
            if not value:
                continue
            rect(canvas, (begin, y), end - begin - (1 if end - begin > 3 else 0), 20, part)
            share = f"{100 * value / sum(row.values):.0f} %"
            if end - begin > text_width(share, 11) + 8:
                canvas.text(((begin + end) / 2, y + 14), share, f"on-{part}", 11, "middle", bold=True)
        canvas.text((x(at) + 6, y + 14), text(at, chart.x.unit), "muted")
    return bottom + 46


def waterfall(chart: Waterfall, canvas: Canvas, inside: Inside) -> float:
    left, top = _left([row.name for row in chart.rows], inside), inside[1] + 6
    ends, reached = [], 0.0
    for row in chart.rows:
        begin = 0.0 if row.total else reached
        reached = begin + row.value
        ends.append((begin, reached))
    room = max(text_width(row.text) for row in chart.rows) + 14
    bottom = top + 28 * len(chart.rows)
    x = _axis(canvas, chart.x, max(max(pair) for pair in ends), left, inside[2] - room, top - 4, bottom)
    for number, (row, (begin, end)) in enumerate(zip(chart.rows, ends, strict=True)):
        y = top + 28 * number + 2
        canvas.text((left - 8, y + 13), row.name, anchor="end")
        low, high = x(min(begin, end)), x(max(begin, end))
        rect(canvas, (low, y), max(1.5, high - low), 18, "c0" if row.total else "c2" if row.value < 0 else "c1")
        if number + 1 < len(chart.rows):
            canvas.line([(x(end), y), (x(end), y + 28)], "faint")
        canvas.text((high + 6, y + 13), row.text, "muted")
    return bottom + 46


def timeline(chart: Timeline, canvas: Canvas, inside: Inside) -> float:
    left, top = _left([lane.name for lane in chart.lanes], inside), inside[1] + 24
    last = max(span.end for lane in chart.lanes for span in lane.spans)
    places, y = [], top
    for number, lane in enumerate(chart.lanes):
        y += 0 if number == 0 else 3 if lane.thin else 12
        places.append((y, 12.0 if lane.thin else 24.0))
        y += places[-1][1]
    bottom = y + 10
    x = _axis(canvas, chart.x, last, left, inside[2], top - 6, bottom)
    free = -1.0
    for mark in chart.marks:
        canvas.line([(x(mark.x), top - 8), (x(mark.x), bottom)], "faint", 1, dash=True)
        if x(mark.x) >= free:
            canvas.text((x(mark.x) + 3, top - 11), mark.text, size=11)
            free = x(mark.x) + text_width(mark.text, 11) + 8
    for lane, (y, high) in zip(chart.lanes, places, strict=True):
        canvas.text((left - 8, y + high / 2 + 4), lane.name, anchor="end")
        for span in lane.spans:
            rect(canvas, (x(span.begin), y), max(0.6, x(span.end) - x(span.begin)), high, chart.parts[span.part])
    return bottom + 46
