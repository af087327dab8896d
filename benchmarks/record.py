"""The one form of every result: raw measurements in order, comparisons with intervals, and their files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks import stats

Clock = Literal["wall", "cpu"]
How = Literal["speed", "share", "difference"]
Show = Literal["rate", "milliseconds"]


@dataclass(frozen=True)
class Measurement:
    """One contender in one round: so many units of work took so long. `order` counts over the section."""

    order: int
    round: int
    contender: str
    units: int
    wall_seconds: float
    cpu_seconds: float
    details: dict[str, Any] = field(default_factory=dict)

    def seconds_per_unit(self, clock: Clock) -> float:
        return (self.wall_seconds if clock == "wall" else self.cpu_seconds) / self.units


@dataclass(frozen=True)
class Comparison:
    """Ours against theirs, round by round.

    speed: their time over ours, so 2 means twice as fast. share: our time as a part of theirs. difference:
    our time less theirs, in milliseconds. The target is a lower bound of a speed, an upper one of the others.
    """

    ours: str
    theirs: str
    how: How
    clock: Clock
    values: list[float]
    median: float
    interval: tuple[float, float] | None
    target: float | None = None

    @property
    def verdict(self) -> str:
        """Met only where the whole interval meets it: a median that meets it by luck is not enough."""
        if self.target is None:
            return ""
        low, high = self.interval or (self.median, self.median)
        worst = low if self.how == "speed" else high

        def meets(value: float) -> bool:
            assert self.target is not None
            return value >= self.target if self.how == "speed" else value <= self.target

        if not meets(self.median):
            return "missed"
        if self.interval is None:
            return "met (n = 1)"
        return "met" if meets(worst) else "met by the median only"


@dataclass
class Section:
    """The answer to one question. Where `valid` is false, the figures must not be quoted; notes say why."""

    name: str
    title: str
    unit: str
    show: Show
    measurements: list[Measurement]
    comparisons: list[Comparison] = field(default_factory=list)
    valid: bool = True
    notes: list[str] = field(default_factory=list)

    def refuse(self, reason: str) -> None:
        """Mark the figures as not to be quoted."""
        self.valid = False
        self.notes.append(f"Not valid: {reason}")


def contenders(measurements: Sequence[Measurement]) -> list[str]:
    """Names in alphabetical order, so that the tables of two dates line up."""
    return sorted({one.contender for one in measurements})


def by_round(measurements: Sequence[Measurement], contender: str, clock: Clock) -> dict[int, float]:
    """Seconds per unit of one contender, keyed by round."""
    return {one.round: one.seconds_per_unit(clock) for one in measurements if one.contender == contender}


def compare(
    measurements: Sequence[Measurement],
    ours: str,
    theirs: str,
    how: How,
    clock: Clock = "wall",
    target: float | None = None,
) -> Comparison | None:
    """Compare two contenders within each round; None where no round has both."""
    mine, other = by_round(measurements, ours, clock), by_round(measurements, theirs, clock)
    if how == "speed":
        values = stats.ratio_per_round(other, mine)
    elif how == "share":
        values = stats.ratio_per_round(mine, other)
    else:
        values = [1000 * value for value in stats.difference_per_round(mine, other)]
    if not values:
        return None
    interval = stats.interval(values, log=how != "difference")
    return Comparison(ours, theirs, how, clock, values, stats.median(values), interval, target)


def as_document(section: Section, machine: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that was measured, for a machine to read."""
    return {
        "section": section.name,
        "title": section.title,
        "valid": section.valid,
        "notes": section.notes,
        "unit": section.unit,
        "settings": dict(settings),
        "machine": dict(machine),
        "comparisons": [{**asdict(one), "verdict": one.verdict} for one in section.comparisons],
        "measurements": [asdict(one) for one in section.measurements],
    }


def as_markdown(section: Section, machine: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """The same for a person: contenders, comparisons, notes, machine."""
    lines = [f"# {section.title}", ""]
    if not section.valid:
        lines += ["**These figures are not valid: see the notes.**", ""]
    if _says_something(section.measurements):
        lines += [*_contender_table(section), ""]
    if section.comparisons:
        lines += [*_comparison_table(section.comparisons), ""]
    if section.notes:
        lines += ["## Notes", "", *(f"- {note}" for note in section.notes), ""]
    lines += ["## Measured on", "", *_machine_lines(machine, settings), ""]
    return "\n".join(lines)


def write(folder: Path, stem: str, section: Section, machine: Mapping[str, Any], settings: Mapping[str, Any]) -> Path:
    """Write `<stem>.json` and `<stem>.md`; the path of the table comes back."""
    folder.mkdir(parents=True, exist_ok=True)
    document = as_document(section, machine, settings)
    (folder / f"{stem}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    table = folder / f"{stem}.md"
    table.write_text(as_markdown(section, machine, settings), encoding="utf-8")
    return table


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table with its first column to the left and every other one to the right, where numbers belong."""
    rule = ["---", *("---:" for _ in headers[1:])]
    return [f"| {' | '.join(row)} |" for row in (headers, rule, *rows)]


def _says_something(measurements: Sequence[Measurement]) -> bool:
    """Of contenders that were measured once each, without their processor time, the table would say next to nothing: the notes have it all."""
    return len(measurements) > len(contenders(measurements)) or any(one.cpu_seconds for one in measurements)


def _contender_table(section: Section) -> list[str]:
    if section.show == "rate":
        headers = [
            "contender",
            f"{section.unit}/s, median",
            "lowest",
            "highest",
            f"{section.unit}/CPU s",
            "n",
        ]
    else:
        headers = [
            "contender",
            f"ms/{section.unit}, median",
            "lowest",
            "highest",
            f"CPU ms/{section.unit}",
            "n",
        ]
    with_loss = any("loss" in one.details for one in section.measurements)
    rows = []
    for name in contenders(section.measurements):
        mine = [one for one in section.measurements if one.contender == name]
        wall, cpu = ([_shown(one.seconds_per_unit(c), section.show) for one in mine] for c in ("wall", "cpu"))
        row = [
            name,
            _number(stats.median(wall)),
            _number(min(wall)),
            _number(max(wall)),
            _number(stats.median(cpu)),
        ]
        rows.append([*row, str(len(mine)), *(_learnt(mine[-1]) if with_loss else ())])
    return markdown_table([*headers, *(("loss", "accuracy") if with_loss else ())], rows)


def _learnt(measurement: Measurement) -> tuple[str, str]:
    loss, accuracy = (measurement.details.get(key, float("nan")) for key in ("loss", "accuracy"))
    return f"{loss:.6f}", f"{accuracy:.2%}"


def _shown(seconds_per_unit: float, show: Show) -> float:
    if show == "milliseconds":
        return 1000 * seconds_per_unit
    return 1 / seconds_per_unit if seconds_per_unit > 0 else float("nan")


def _number(value: float) -> str:
    """Three or more significant digits, never an exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.4f}"


def _comparison_table(comparisons: Sequence[Comparison]) -> list[str]:
    rows = []
    for one in comparisons:
        interval = f"{_figure(one, one.interval[0])} to {_figure(one, one.interval[1])}" if one.interval else "–"
        sign = "≥" if one.how == "speed" else "≤"
        target = f"{sign} {_figure(one, one.target)}" if one.target is not None else "–"
        words = {"speed": "times the speed of", "share": "as a share of", "difference": "longer than"}[one.how]
        rows.append(
            [
                f"{one.ours} {words} {one.theirs}",
                one.clock,
                _figure(one, one.median),
                interval,
                str(len(one.values)),
                target,
                one.verdict or "–",
            ]
        )
    headers = ["comparison within a round", "clock", "median", "95 % interval", "n", "target", "verdict"]
    return markdown_table(headers, rows)


def _figure(comparison: Comparison, value: float) -> str:
    if comparison.how == "speed":
        return f"{value:.2f}"
    return f"{100 * value:.3f} %" if comparison.how == "share" else f"{value:.1f} ms"


def _machine_lines(machine: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    lines = []
    for key, value in {**machine, **settings}.items():
        if isinstance(value, Mapping):
            text = ", ".join(f"{name} {inner}" for name, inner in value.items())
        elif isinstance(value, list | tuple):
            text = ", ".join(str(inner) for inner in value)
        else:
            text = str(value)
        lines.append(f"- {key.replace('_', ' ')}: {text}")
    return lines
