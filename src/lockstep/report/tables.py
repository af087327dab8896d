"""The data of a plot, and a table, as rows for a CSV file; the first row names the columns. The page saves the same."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from lockstep.report.views import AnyChart, Axis, Bars, Lines, Points, Scatter, Table, Waterfall
from lockstep.units import UNITS

Row = list[Any]


def column(axis: Axis) -> str:
    base = UNITS[axis.unit].base
    return f"{axis.label} ({base})" if base else axis.label


def data(chart: AnyChart) -> list[Row]:
    if isinstance(chart, Lines):
        head: Row = ["series", column(chart.x), column(chart.y), "low", "high", "point"]
        return [
            head,
            *(
                [one.name, *values]
                for one in chart.series
                for values in zip_longest(one.x, one.y, one.low, one.high, one.texts)
            ),
        ]
    if isinstance(chart, Bars):
        head = ["bar", *(f"{part} ({UNITS[chart.x.unit].base})" for part in chart.parts)]
        return [head, *([row.name, *row.values] for row in chart.rows)]
    if isinstance(chart, Waterfall):
        head = ["part", column(chart.x), "total", "text"]
        return [head, *([row.name, row.value, int(row.total), row.text] for row in chart.rows)]
    if isinstance(chart, Points):
        head = ["name", column(chart.x), "low", "high", "text"]
        return [head, *([row.name, row.value, row.low, row.high, row.text] for row in chart.rows)]
    if isinstance(chart, Scatter):
        x, y = column(chart.x), column(chart.y)
        head = ["name", x, f"{x} low", f"{x} high", y, f"{y} low", f"{y} high", column(chart.size)]
        return [
            head,
            *([dot.name, dot.x, dot.x_low, dot.x_high, dot.y, dot.y_low, dot.y_high, dot.size] for dot in chart.dots),
        ]
    rows = [
        [lane.name, chart.parts[span.part], span.begin, span.end, span.text]
        for lane in chart.lanes
        for span in lane.spans
    ]
    return [["lane", "part", "begin (s)", "end (s)", "text"], *rows]


def cells(table: Table) -> list[Row]:
    """A column of numbers becomes two: the number, and what is written, with interval and verdict."""
    head: Row = []
    for place, name in enumerate(table.columns):
        head += [name, f"{name}, in words"] if place in table.right else [name]
    rows = [head]
    for row in table.rows:
        found: Row = []
        for place, cell in enumerate(row):
            words = "; ".join([cell.text, *cell.notes])
            found += [cell.value, words] if place in table.right else [cell.text]
        rows.append(found)
    return rows


def csv_text(rows: Sequence[Row]) -> str:
    file = io.StringIO(newline="")
    csv.writer(file).writerows(rows)
    return file.getvalue()
