"""Small plots of characters, for people who work over ssh: curves in braille dots, bars in blocks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import click

from lockstep.text import printable

if TYPE_CHECKING:
    from rich.text import Text

plot_option = click.option(
    "--plot/--no-plot", "plot", default=None, help="Draw curves and bars too. By default, on a terminal."
)
COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red", "white")
# Shades tell parts of a bar apart where there is no colour; they take turns.
SHADES = "█▓▒░"
EIGHTHS = " ▏▎▍▌▋▊▉█"
# Dots of a braille character, by row and column.
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
Curve = Sequence[tuple[float, float]]
Form = Callable[[float], str]


def wanted(plot: bool | None) -> bool:
    return sys.stdout.isatty() if plot is None else plot


def curves(title: str, series: Mapping[str, Curve], form: Form, width: int = 46, height: int = 8) -> Text:
    """Lines over a common axis. Every second line is dotted, so that they can be told apart without colour."""
    from rich.text import Text

    points = [point for curve in series.values() for point in curve]
    low_x, high_x = min(x for x, _ in points), max(x for x, _ in points)
    low_y, high_y = min(y for _, y in points), max(y for _, y in points)
    grid = [[0] * width for _ in range(height)]
    owner = [[0] * width for _ in range(height)]

    def place(x: float, y: float) -> tuple[int, int]:
        across = (x - low_x) / (high_x - low_x) if high_x > low_x else 0.5
        up = (y - low_y) / (high_y - low_y) if high_y > low_y else 0.5
        return round(across * (2 * width - 1)), round((1 - up) * (4 * height - 1))

    for number, curve in enumerate(series.values()):
        for column, row in _dots([place(x, y) for x, y in curve], sparse=number % 2 == 1):
            grid[row // 4][column // 2] |= DOTS[row % 4][column % 2]
            owner[row // 4][column // 2] = number
    labels = {0: form(high_y), height - 1: form(low_y)}
    margin = max(len(label) for label in labels.values())
    found = Text(title, style="bold")
    for number, name in enumerate(series):
        found.append(f"  {'──' if number % 2 == 0 else '··'} {name}", style=COLOURS[number % len(COLOURS)])
    for number, (cells, owners) in enumerate(zip(grid, owner, strict=True)):
        found.append(f"\n{labels.get(number, ''):>{margin}} ┤", style="dim")
        for cell, who in zip(cells, owners, strict=True):
            found.append(chr(0x2800 + cell) if cell else " ", style=COLOURS[who % len(COLOURS)])
    ends = f"{low_x:g}", f"{high_x:g}"
    found.append(
        f"\n{'':>{margin}} └{'─' * width}\n{'':>{margin}}  {ends[0]}{ends[1]:>{width - len(ends[0])}}", style="dim"
    )
    return found


def _dots(places: Sequence[tuple[int, int]], sparse: bool) -> Sequence[tuple[int, int]]:
    """The dots between the points of a curve; of a sparse one every third."""
    found = list(places[:1])
    for (x0, y0), (x1, y1) in pairwise(places):
        steps = max(abs(x1 - x0), abs(y1 - y0), 1)
        found += [(round(x0 + (x1 - x0) * k / steps), round(y0 + (y1 - y0) * k / steps)) for k in range(1, steps + 1)]
    return [dot for number, dot in enumerate(found) if not sparse or number % 3 == 0]


def stacked(rows: Sequence[tuple[str, Sequence[float]]], parts: Sequence[str], form: Form, width: int = 60) -> Text:
    """One bar a row, divided into parts, with the whole of it at its end."""
    from rich.text import Text

    most = max((sum(values) for _, values in rows), default=0.0) or 1.0
    margin = max(len(name) for name, _ in rows)
    found = Text()
    for name, values in rows:
        found.append(f"{name:>{margin}} ")
        reached, drawn = 0.0, 0
        for number, value in enumerate(values):
            reached += value
            until = round(reached / most * width)
            found.append(_shade(number) * (until - drawn), style=COLOURS[number % len(COLOURS)])
            drawn = until
        found.append(f" {form(sum(values))}\n")
    found.append(" " * margin)
    for number, part in enumerate(parts):
        if any(values[number] for _, values in rows):
            found.append(f" {_shade(number)} {part}", style=COLOURS[number % len(COLOURS)])
    return found


def _shade(number: int) -> str:
    return SHADES[number % len(SHADES)]


def bars(
    title: str, rows: Sequence[tuple[str, float, float | None, float | None]], form: Form, width: int = 40
) -> Text:
    """One bar a row from zero, with its interval as a line: name, value, low, high."""
    from rich.text import Text

    most = max(value for _, value, _, _ in rows) or 1.0
    names = [printable(name) for name, *_ in rows]
    margin = min(44, max(map(len, names)))
    found = Text(title, style="bold")
    for name, (_, value, low, high) in zip(names, rows, strict=True):
        found.append(f"\n{name[:margin]:>{margin}} ")
        found.append(_bar(value / most, width).ljust(width), style=COLOURS[0])
        between = "" if low is None or high is None else f"  {form(low)} to {form(high)}"
        found.append(f" {form(value)}")
        found.append(between, style="dim")
    return found


def _bar(share: float, width: int) -> str:
    eighths = max(0, round(share * width * 8))
    return "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def print_run_plots(run: Any, phases: Mapping[str, Any] | None) -> None:
    """Accuracy and loss by epoch, and where a step of each rank goes."""
    from rich.columns import Columns

    from lockstep.cli.output import console
    from lockstep.measure.phases import NAMES
    from lockstep.report.units import text

    out, epochs = console(), run.epochs()
    found = []
    for name, form in (("accuracy", lambda value: f"{value:.1%}"), ("loss", lambda value: f"{value:.3g}")):
        series = {kind: _curve(epochs, f"{kind}_{name}") for kind in ("test", "train")}
        known = {kind: curve for kind, curve in series.items() if len(curve) > 1}
        if known:
            found.append(curves(name, known, form))
    if found:
        out.print(Columns(found, padding=(0, 4)))
    if phases:
        rows = [
            (f"rank {rank}", [max(0.0, part[name]) / 1e9 for name in NAMES])
            for rank, part in enumerate(phases["ranks"][:16])
            if part
        ]
        out.print(stacked(rows, NAMES, lambda seconds: text(seconds, "seconds")))


def _curve(epochs: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    return [(epoch["epoch"], epoch[key]) for epoch in epochs if epoch.get(key) is not None]


def print_study_plots(document: Mapping[str, Any]) -> None:
    """The middle of each cell, one plot for each of the first three metrics."""
    from lockstep.cli.output import console
    from lockstep.report.units import text
    from lockstep.study.measures import METRICS

    out = console()
    for name in document["metrics"][:3]:
        metric = METRICS[name]
        rows = [
            (cell["cell"], column["median"], column["low"], column["high"])
            for cell in document["cells"]
            if (column := cell["metrics"].get(name)) and column["median"] is not None
        ]
        if rows:
            out.print(bars(metric.title(document["target_accuracy"]), rows, partial(text, unit=metric.unit)))
