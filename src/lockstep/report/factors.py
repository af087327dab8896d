"""What a factor does: accuracy, time and memory against batch size, ranks, accumulation …; where cells have no order, by name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from lockstep.metrics import metric_of
from lockstep.report.subject import Subject
from lockstep.report.views import Axis, Lines, Point, Points, Series, short, sure
from lockstep.settings import dotted
from lockstep.study.gather import Group
from lockstep.units import span

SECTION = "factor"
MOST_FACTORS, MOST_METRICS, MOST_ROWS = 2, 4, 30
# Follow from others: not what anybody varied.
DERIVED = ("seed", "micro_batch", "lr_batch")
# What a single process has no choice of.
OF_RANKS = ("launcher", "strategy", "backend")
# From this ratio of one value to the next on, they are multiples, and their axis is logarithmic.
MULTIPLE, FAR = 1.5, 4.0
GROWS = " × "
Settings = dict[str, Any]


@dataclass(frozen=True)
class Line:
    """Cells that differ in one number, and in what goes with it."""

    name: str
    cells: list[str]


def charts(subject: Subject) -> Sequence[Lines | Points]:
    cells, metrics = _settings(subject), _metrics(subject)
    if len(cells) < 2:
        return []
    over = [_lines(subject, cells, key, metric) for key in _keys(subject, cells) for metric in metrics]
    found = [chart for chart in over if chart]
    return found or [chart for metric in metrics if (chart := _points(subject, metric))]


def _metrics(subject: Subject) -> list[str]:
    """What was asked for, what is learned first. The rate says what the time says."""
    asked = [name for name in subject.comparison["metrics"] if name != "images_per_second"]
    return sorted(asked, key=lambda name: not metric_of(name).learned)[:MOST_METRICS]


def _settings(subject: Subject) -> dict[str, Settings]:
    """Of each cell that was measured: what differs between them, by key."""
    found: dict[str, Settings] = {group.name: _of_cell(group) for group in subject.done}
    differ = {
        key for cell in found.values() for key in cell if len({repr(other.get(key)) for other in found.values()}) > 1
    }
    # The batch per rank is the factor where it was varied by itself; with more ranks the whole batch says what is computed.
    differ -= {"global_batch"} if "batch_per_rank" in differ and "ranks" not in differ else {"batch_per_rank"}
    several = [cell for cell in found.values() if cell.get("ranks") != 1]
    if "ranks" in differ:
        differ -= {key for key in OF_RANKS if len({cell.get(key) for cell in several}) < 2}
    return {name: {key: cell.get(key) for key in sorted(differ)} for name, cell in found.items()}


def _of_cell(group: Group) -> Settings:
    spec = group.spec
    found = {key: value for key, value in dotted(*spec.known()).items() if key not in DERIVED}
    return {**found, "accumulation": spec.plan.accumulation or None, "threads": spec.placement.threads or None}


def _keys(subject: Subject, cells: Mapping[str, Settings]) -> list[str]:
    """Which numbers are worth an axis: the study's own factors; the only key that differs; else the one of the longest line, from three values on."""
    numbers = [key for key in next(iter(cells.values())) if len(_values(cells, key)) > 1]
    factors = subject.study.read().study.factors if subject.study else {}
    stated = {key for levels in factors.values() for keys in levels.values() for key in keys}
    own = [key for key in numbers if key in stated]
    if own or len(next(iter(cells.values()))) == 1:
        return (own or numbers)[:MOST_FACTORS]
    lines = {key: _families(cells, key) for key in numbers}
    long = [key for key in numbers if any(len(line.cells) > 2 for line in lines[key])]
    return sorted(long, key=lambda key: -len({cell for line in lines[key] for cell in line.cells}))[:1]


def _values(cells: Mapping[str, Settings], key: str) -> list[float]:
    """The numbers that it has; none where it is anything else in some cell."""
    values = [cell[key] for cell in cells.values()]
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in values):
        return []
    return sorted({float(value) for value in values})


def _families(cells: Mapping[str, Settings], key: str) -> list[Line]:
    """The lines over a key: cells that are the same in all else; and from three on, those in which one other number grows with it."""
    others = [other for other in next(iter(cells.values())) if other != key]
    found: dict[tuple[str, ...], list[str]] = {}
    for name, cell in cells.items():
        for grows in (None, *(other for other in others if _values(cells, other) and cell[other] and cell[key])):
            found.setdefault(tuple(_said(cell, key, other, grows) for other in others), []).append(name)
    lines = {
        said: names
        for said, names in found.items()
        if len({cells[name][key] for name in names}) == len(names) > (2 if any(GROWS in each for each in said) else 1)
    }
    # What all lines share is not said; one whose cells all lie on a longer one adds nothing.
    kept = {said: names for said, names in lines.items() if not any(set(names) < set(more) for more in lines.values())}
    shared = set.intersection(*(set(said) for said in kept)) if kept else set()
    return [
        Line(
            ", ".join(each for each in said if each not in shared),
            sorted(names, key=lambda name: float(cells[name][key])),
        )
        for said, names in kept.items()
    ]


def _said(cell: Settings, key: str, other: str, grows: str | None) -> str:
    if other != grows:
        return f"{other}={cell[other]}"
    return f"{other} = {float(cell[other]) / float(cell[key]):g}{GROWS}{key}"


def _lines(subject: Subject, cells: Mapping[str, Settings], key: str, metric: str) -> Lines | None:
    figures = _figures(subject, metric)
    label = metric_of(metric).title(subject.comparison["target_accuracy"])
    series = []
    for number, line in enumerate(_families(cells, key)):
        known = [name for name in line.cells if name in figures]
        if len(known) < 2:
            continue
        series.append(
            Series(
                name=line.name or label,
                colour=f"c{number % 8}",
                x=[short(float(cells[name][key])) for name in known],
                y=[short(figures[name][0]) for name in known],
                low=[short(figures[name][1]) for name in known],
                high=[short(figures[name][2]) for name in known],
                texts=known,
            )
        )
    if not series:
        return None
    ticks = sorted({float(x) for one in series for x in one.x if x is not None})
    return Lines(
        id=_id(f"{metric}-by-{key}"),
        section=SECTION,
        title=f"{label[0].upper()}{label[1:]} over {_words(key)}",
        says=_says(subject),
        x=Axis(label=_words(key), log=_multiples(ticks), ticks=ticks if len(ticks) <= 12 else []),
        y=Axis(label=label, unit=metric_of(metric).unit),
        series=series,
    )


def _figures(subject: Subject, metric: str) -> dict[str, tuple[float, float | None, float | None]]:
    """Of each cell the median and its interval, as the table has them."""
    columns = {cell["cell"]: cell["metrics"].get(metric) for cell in subject.comparison["cells"]}
    return {
        name: (column["median"], column["low"], column["high"])
        for name, column in columns.items()
        if column and column["n"] and short(column["median"]) is not None
    }


def _says(subject: Subject) -> str:
    bars = any(c["low"] is not None for cell in subject.comparison["cells"] for c in cell["metrics"].values() if c)
    level = subject.comparison["level"]
    return (
        f"Median of each cell; bars: {level:.0%} intervals."
        if bars
        else "Each cell was made once, so there are no intervals."
    )


def _multiples(values: Sequence[float]) -> bool:
    return values[0] > 0 and values[-1] >= FAR * values[0] and all(b >= MULTIPLE * a for a, b in pairwise(values))


def _words(key: str) -> str:
    return key.replace("_", " ")


def _id(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text)


def _points(subject: Subject, metric: str) -> Points | None:
    figures = _figures(subject, metric)
    groups = [group for group in subject.groups if group.name in figures][:MOST_ROWS]
    if len(groups) < 2:
        return None
    label, unit = metric_of(metric).title(subject.comparison["target_accuracy"]), metric_of(metric).unit
    return Points(
        id=_id(f"{metric}-by-cell"),
        section=SECTION,
        title=label[0].upper() + label[1:],
        says=_says(subject),
        x=Axis(label=label, unit=unit),
        rows=[
            Point(
                name=group.name,
                colour=subject.colour(group).name,
                value=sure(value),
                low=short(low),
                high=short(high),
                text=span(value, low, high, unit),
            )
            for group in groups
            for value, low, high in [figures[group.name]]
        ],
    )
