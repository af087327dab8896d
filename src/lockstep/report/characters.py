"""Charts of the document as characters, for people who work over ssh: curves in braille dots, bars in blocks. Scatters and timelines need more dots
than a terminal has: the page shows them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from lockstep import units
from lockstep.report.views import AnyChart, Axis, Bars, Lines, Series, Table, Waterfall
from lockstep.text import printable

if TYPE_CHECKING:
    from rich.text import Text

COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red", "white")
# Shades tell parts of a bar apart where there is no colour; they take turns.
SHADES = "█▓▒░"
EIGHTHS = " ▏▎▍▌▋▊▉█"
# Dots of a braille character, by row and column.
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
WIDTH, HEIGHT = 46, 8
MOST_CURVES = len(COLOURS)
MOST_NAME = 40
Points = list[tuple[float, float]]


def figure(chart: AnyChart, width: int = 100) -> Text | None:
    """A chart that is N columns wide; None for what characters cannot show."""
    if isinstance(chart, Lines):
        return curves(chart)
    if isinstance(chart, Bars):
        return stacked(chart, width)
    return falls(chart, width) if isinstance(chart, Waterfall) else None


def curves(chart: Lines) -> Text | None:
    """Lines over common axes. Every second line is dotted, so that they can be told apart without colour."""
    shown = [one for one in chart.series if one.shown and one.role not in chart.hidden]
    found = {one.name: points for one in shown if len(points := _points(one, chart.x, chart.y)) > 1}
    if not found:
        return None
    drawn = dict(list(found.items())[:MOST_CURVES])
    points = [point for curve in drawn.values() for point in curve]
    low_x, high_x = min(x for x, _ in points), max(x for x, _ in points)
    low_y, high_y = min(y for _, y in points), max(y for _, y in points)
    grid = [[0] * WIDTH for _ in range(HEIGHT)]
    owner = [[0] * WIDTH for _ in range(HEIGHT)]

    def place(x: float, y: float) -> tuple[int, int]:
        across = (x - low_x) / (high_x - low_x) if high_x > low_x else 0.5
        up = (y - low_y) / (high_y - low_y) if high_y > low_y else 0.5
        return round(across * (2 * WIDTH - 1)), round((1 - up) * (4 * HEIGHT - 1))

    for number, curve in enumerate(drawn.values()):
        for column, row in _dots([place(x, y) for x, y in curve], sparse=number % 2 == 1):
            grid[row // 4][column // 2] |= DOTS[row % 4][column % 2]
            owner[row // 4][column // 2] = number
    labels = {0: _end(high_y, chart.y), HEIGHT - 1: _end(low_y, chart.y)}
    margin = max(len(label) for label in labels.values())
    text = _legend(chart.title, list(drawn), len(found) - len(drawn))
    for number, (cells, owners) in enumerate(zip(grid, owner, strict=True)):
        text.append(f"\n{labels.get(number, ''):>{margin}} ┤", style="dim")
        for cell, who in zip(cells, owners, strict=True):
            text.append(chr(0x2800 + cell) if cell else " ", style=COLOURS[who % len(COLOURS)])
    left, right = _end(low_x, chart.x), f"{_end(high_x, chart.x)} {chart.x.label}"
    text.append(
        f"\n{'':>{margin}} └{'─' * WIDTH}\n{'':>{margin}}  {left}{right:>{max(len(right) + 1, WIDTH - len(left))}}",
        "dim",
    )
    for mark in chart.marks:
        text.append(f"\n{printable(mark.text)}", style="dim")
    return text


def _points(one: Series, x: Axis, y: Axis) -> Points:
    """Where both are known, on the scales of the axes."""
    found = [(a, b) for a, b in zip(one.x, one.y, strict=True) if a is not None and b is not None]
    able = [(a, b) for a, b in found if not (x.log and a <= 0) and not (y.log and b <= 0)]
    return [(math.log10(a) if x.log else a, math.log10(b) if y.log else b) for a, b in able]


def _end(value: float, axis: Axis) -> str:
    return units.text(10**value if axis.log else value, axis.unit)


def _legend(title: str, names: Sequence[str], more: int) -> Text:
    """Short names stand beside the title, long ones below each other."""
    from rich.text import Text

    text = Text(printable(title), style="bold")
    keys = [f"{'──' if number % 2 == 0 else '··'} {printable(name)}" for number, name in enumerate(names)]
    gap = "  " if len("  ".join([title, *keys])) <= WIDTH + 8 else "\n  "
    for number, key in enumerate(keys):
        text.append(f"{gap}{key}", style=COLOURS[number % len(COLOURS)])
    if more:
        text.append(f"{gap}and {more} more, on the page", style="dim")
    return text


def _dots(places: Sequence[tuple[int, int]], sparse: bool) -> Sequence[tuple[int, int]]:
    """The dots between the points of a curve; of a sparse one every third."""
    found = list(places[:1])
    for (x0, y0), (x1, y1) in pairwise(places):
        steps = max(abs(x1 - x0), abs(y1 - y0), 1)
        found += [(round(x0 + (x1 - x0) * k / steps), round(y0 + (y1 - y0) * k / steps)) for k in range(1, steps + 1)]
    return [dot for number, dot in enumerate(found) if not sparse or number % 3 == 0]


def stacked(chart: Bars, width: int) -> Text | None:
    """One bar a row, divided into parts, with the whole of it at its end."""
    from rich.text import Text

    rows = [(printable(row.name), row.values) for row in chart.rows if row.role not in chart.hidden]
    if not rows:
        return None
    margin = _margin([name for name, _ in rows])
    room = max(10, min(60, width - margin - 12))
    most = max(sum(values) for _, values in rows) or 1.0
    text = Text(printable(chart.title), style="bold")
    for name, values in rows:
        text.append(f"\n{_cut(name, margin)} ", "default")
        reached, drawn = 0.0, 0
        for number, value in enumerate(values):
            reached += value
            until = round(reached / most * room)
            text.append(_shade(number) * (until - drawn), style=COLOURS[number % len(COLOURS)])
            drawn = until
        text.append(f" {units.text(sum(values), chart.x.unit)}", "default")
    seen = [number for number in range(len(chart.parts)) if any(values[number] for _, values in rows)]
    keys = [f" {_shade(number)} {chart.parts[number]}" for number in seen]
    text.append("\n" + " " * (margin if margin + len("".join(keys)) <= width else 0))
    for number, key in zip(seen, keys, strict=True):
        text.append(key, style=COLOURS[number % len(COLOURS)])
    return text


def _shade(number: int) -> str:
    return SHADES[number % len(SHADES)]


def falls(chart: Waterfall, width: int) -> Text:
    """Each part begins where the one before it ended."""
    reached, rows = 0.0, []
    for row in chart.rows:
        begin = 0.0 if row.total else reached
        reached = begin + row.value
        rows.append((row.name, min(begin, reached), max(begin, reached), row.text))
    return _rows(chart.title, rows, width)


def table_bars(table: Table, width: int) -> list[Text]:
    """The columns of a table that are worth a look: one bar a row from zero, with what the cell says."""
    found = []
    for column in table.bars:
        cells = [(row[0].text, row[column]) for row in table.rows]
        known = [(name, 0.0, cell.value, cell.text) for name, cell in cells if cell.value is not None]
        if known:
            found.append(_rows(table.columns[column], known, width))
    return found


def _rows(title: str, rows: Sequence[tuple[str, float, float, str]], width: int) -> Text:
    """Bars from begin to end, with a text after them."""
    from rich.text import Text

    most = max(end for _, _, end, _ in rows) or 1.0
    names = [printable(name) for name, *_ in rows]
    margin, after = _margin(names), max(len(text) for *_, text in rows)
    room = max(10, min(40, width - margin - after - 3))
    text = Text(printable(title), style="bold")
    for name, (_, begin, end, said) in zip(names, rows, strict=True):
        before = int(begin / most * room)
        text.append(f"\n{_cut(name, margin)} ", "default")
        text.append((" " * before + _bar(end / most * room - before)).ljust(room), style=COLOURS[0])
        text.append(f" {said}", "default")
    return text


def _bar(columns: float) -> str:
    eighths = max(0, round(columns * 8))
    return "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def _margin(names: Sequence[str]) -> int:
    return min(MOST_NAME, max(map(len, names)))


def _cut(name: str, margin: int) -> str:
    return f"{name if len(name) <= margin else name[: margin - 1] + '…':>{margin}}"
