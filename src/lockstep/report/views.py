"""What a report consists of, as plain data: plots, tables, findings. Whoever draws them needs to know nothing about runs.

Numbers are in base units (seconds, bytes, shares of 1) and rounded to six digits that count; `unit` says how they are written.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from lockstep.units import percent

Numbers = list[float | None]
DIGITS = 6
# A finding that costs less than this share of the time is said without it.
LEAST_COST = 0.005


class View(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of all views: what is as usual is left out of the JSON."""


class Axis(View, frozen=True):
    label: str
    unit: str = "number"
    log: bool = False
    ticks: list[float] = []
    """Where its marks stand; left out: at round numbers."""


class Series(View, frozen=True):
    """One line."""

    name: str
    colour: str
    x: Numbers
    y: Numbers
    low: Numbers = []
    """With `high`: a band around the line."""
    high: Numbers = []
    texts: list[str] = []
    """A name for each point, where they have one."""
    role: str = ""
    """train, test, ranks …: a switch above the plot shows and hides all lines of a role."""
    dash: bool = False
    shown: bool = True
    over: list[Numbers] = []
    """Where its points lie on each of the other axes that the plot has."""


class Mark(View, frozen=True):
    """A place on the x axis that is worth a word."""

    x: float
    text: str
    colour: str = "ink"
    over: Numbers = []
    """Where it is on each of the other axes; where that is not known, it is not marked there."""


class Chart(View, frozen=True):
    """What all plots have."""

    id: str
    """Also the name of the file that it is saved as."""
    section: str
    title: str
    says: str
    """One sentence or two: what is to be seen, and how it was measured."""


class Lines(Chart, frozen=True, tag="lines", tag_field="kind"):
    x: Axis
    y: Axis
    series: list[Series]
    marks: list[Mark] = []
    hidden: list[str] = []
    """Roles that are not shown at first."""
    over: list[Axis] = []
    """Other axes that the reader may choose in the place of x."""
    smooth: bool = False
    """Whether the reader may smooth it."""


class Bar(View, frozen=True):
    name: str
    values: list[float]
    role: str = ""


class Bars(Chart, frozen=True, tag="bars", tag_field="kind"):
    """Stacked bars, one a row."""

    x: Axis
    parts: list[str]
    """Also the names of their colours."""
    rows: list[Bar]
    hidden: list[str] = []


class Fall(View, frozen=True):
    name: str
    value: float
    total: bool = False
    """Starts at zero, instead of where the one before ended."""
    text: str = ""


class Waterfall(Chart, frozen=True, tag="waterfall", tag_field="kind"):
    x: Axis
    rows: list[Fall]


class Dot(View, frozen=True):
    name: str
    colour: str
    x: float
    y: float
    size: float | None = None
    x_low: float | None = None
    x_high: float | None = None
    y_low: float | None = None
    y_high: float | None = None


class Scatter(Chart, frozen=True, tag="scatter", tag_field="kind"):
    x: Axis
    y: Axis
    size: Axis
    dots: list[Dot]


class Point(View, frozen=True):
    """A value with its interval."""

    name: str
    colour: str
    value: float
    low: float | None = None
    high: float | None = None
    text: str = ""


class Points(Chart, frozen=True, tag="points", tag_field="kind"):
    """One value a row: for what has names and no order."""

    x: Axis
    rows: list[Point]


class Span(View, frozen=True, array_like=True):
    part: int
    begin: float
    end: float
    text: str = ""


class Lane(View, frozen=True):
    name: str
    spans: list[Span]
    thin: bool = False
    """Goes with the lane above it."""


class Timeline(Chart, frozen=True, tag="timeline", tag_field="kind"):
    x: Axis
    parts: list[str]
    lanes: list[Lane]
    marks: list[Mark] = []


AnyChart = Lines | Bars | Waterfall | Scatter | Points | Timeline


class Cell(View, frozen=True):
    """One cell of a table: what is written, and what it is sorted by."""

    text: str
    value: float | None = None
    notes: list[str] = []
    """Lines below it."""
    faint: bool = False
    """Not significant."""


class Table(View, frozen=True):
    id: str
    title: str
    says: str
    columns: list[str]
    rows: list[list[Cell]]
    right: list[int] = []
    """Columns that hold numbers."""
    spare: list[int] = []
    """Columns that a narrow view does without, the most spare first."""
    bars: list[int] = []
    """Columns that are worth a bar."""
    below: str = ""
    """What a mark in its cells means."""


class Said(View, frozen=True):
    """A finding, and the cell or run that it is about."""

    question: str
    verdict: str
    why: str = ""
    next: str = ""
    cost: float = 0.0

    def share(self) -> str:
        """What of the time it costs, in words; empty where that is next to nothing."""
        return f"{percent(self.cost)} of the time" if self.cost >= LEAST_COST else ""

    def lines(self) -> list[tuple[str, str]]:
        """What stands below the verdict: why, and what to do next, as far as they are known."""
        return [(label, text) for label, text in (("why", self.why), ("next", self.next)) if text]


class About(View, frozen=True):
    """All findings of one cell or run."""

    name: str
    findings: list[Said]


class Claim(View, frozen=True):
    text: str
    verdict: str
    figures: str
    why: str = ""


class Published(View, frozen=True):
    source: str
    claims: list[Claim]


class Command(View, frozen=True):
    name: str
    lines: list[str]


class Part(View, frozen=True):
    """A run, some runs, or a study."""

    name: str
    kind: str
    about: str = ""
    facts: list[tuple[str, str]] = []
    headlines: list[Said] = []
    """What a study found, beside what is found in its cells."""
    findings: list[About] = []
    notes: list[str] = []
    table: Table | None = None
    tables: list[Table] = []
    """Of a run: its epochs and its ranks."""
    published: list[Published] = []
    charts: list[AnyChart] = []
    settings: Table | None = None
    same: Table | None = None
    """Settings that are the same in all cells."""
    environment: Table | None = None
    commands: list[Command] = []


class Report(View, frozen=True):
    """The whole of it."""

    title: str
    written: float
    lockstep: str
    parts: list[Part]
    definitions: dict[str, str] = {}
    """Of each question: how its numbers come about."""


def short(value: float | None) -> float | None:
    """Six digits that count; whole numbers as such; None for what is not a number."""
    if value is None or not math.isfinite(value):
        return None
    if float(value).is_integer() and abs(value) < 10**DIGITS:
        return int(value)
    return float(f"{value:.{DIGITS}g}")


def shorts(values: Iterable[float | None]) -> Numbers:
    return [short(value) for value in values]


def sure(value: float) -> float:
    """`short` of a number that is known to be one; 0 for infinities, which no axis can show."""
    return short(value) or 0.0
