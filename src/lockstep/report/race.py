"""A race as a part of the document: one row a contender, what is settled, why, and what to do next."""

from __future__ import annotations

import re
import shlex
import statistics
from collections.abc import Sequence

from msgspec.structs import replace

from lockstep import units
from lockstep.report.views import (
    AnyChart,
    Axis,
    Cell,
    Command,
    Lines,
    Part,
    Point,
    Points,
    Said,
    Series,
    Table,
    short,
    shorts,
    sure,
)
from lockstep.turns import estimate
from lockstep.turns.estimate import Ratio, Window
from lockstep.turns.folder import Record
from lockstep.turns.where import where

COLUMNS = ["contender", "verdict", "speed", "samples/s", "step", "exchange", "starts"]
RIGHT = [2, 3, 4, 5, 6]
SPARE = [5, 4, 6]
# What of the machine's time other work may take before wall times say as much about that as about the contenders.
BUSY = 0.1


def race_part(record: Record, windows: Sequence[Window], name: str) -> Part:
    return Part(
        name=name,
        kind="race",
        about=_about(record),
        table=table(record, windows),
        headlines=[said(record, windows)],
        notes=_notes(record, windows),
        charts=[*_speeds(record), *_charts(record, windows)],
        environment=_environment(record),
        commands=[Command("race", [_again(record)])],
    )


def _environment(record: Record) -> Table:
    facts = [("processor", record.cpu), ("Lockstep", record.lockstep), *record.machine.items()]
    return Table("environment", "Environment", "", ["", ""], [[Cell(name), Cell(value)] for name, value in facts])


def _again(record: Record) -> str:
    names = shlex.join(_plain(entry.name) for entry in record.entries)
    common = f" --all {shlex.quote(record.common)}" if record.common else ""
    return f"lockstep race {names}{common} --budget {record.budget.seconds:g}s --until {100 * record.budget.margin:g}%"


def table(record: Record, windows: Sequence[Window]) -> Table:
    ratios = {ratio.contender: ratio for ratio in record.ratios}
    rows = [
        _row(entry.name, ratios.get(entry.name), record, [w for w in windows if w.contender == entry.name])
        for entry in record.entries
    ]
    what = "lines" if any(entry.command and not entry.images for entry in record.entries) else "samples"
    says = f"speed: {what} per second as a multiple of the first contender's, from ratios within rounds; the interval is over its starts, of which there are n."
    columns = [column.replace("samples", what) for column in COLUMNS]
    return Table("race", "Contenders", says, columns, rows, right=RIGHT, spare=SPARE)


def _row(name: str, ratio: Ratio | None, record: Record, mine: Sequence[Window]) -> list[Cell]:
    if reason := record.failures.get(name):
        return [Cell(name), Cell("failed", notes=[reason]), *[Cell("–")] * 5]
    if not mine:
        return [Cell(name), Cell("starting"), *[Cell("–")] * 5]
    cost = statistics.median(window.cost("wall") for window in mine)
    step = statistics.median(window.wall / window.steps for window in mine)
    exchange = statistics.median(window.phases.get("exchange", 0.0) / window.wall for window in mine)
    first = name == record.entries[0].name
    verdict = "baseline" if first else ratio.verdict if ratio else "not settled"
    starts = len({window.start for window in mine})
    return [
        Cell(name),
        Cell(verdict, faint=verdict in ("not settled", "baseline")),
        Cell("1" if first else speed(ratio)),
        Cell(f"{1 / cost:,.0f}", 1 / cost),
        Cell(units.duration(step), step),
        Cell(units.percent(exchange), exchange) if exchange > 0 else Cell("–"),
        Cell(str(starts), starts),
    ]


def speed(ratio: Ratio | None) -> str:
    """How many times as fast, with its interval."""
    if ratio is None or ratio.effect is None:
        return "–"
    low, high = (None if bound is None else 1 / bound for bound in (ratio.high, ratio.low))
    return units.ratio(1 / ratio.effect, low, high, ratio.n)


def _about(record: Record) -> str:
    starts = "one start" if record.starts == 1 else f"{record.starts} starts"
    contenders = f"{len(record.entries)} contenders, {starts} of each, {units.duration(record.seconds)}"
    return contenders if record.over else f"{contenders}, not over"


def said(record: Record, windows: Sequence[Window]) -> Said:
    """The answer in one sentence."""
    question = "Which is the fastest?"
    baseline, ratios = record.entries[0].name, [ratio for ratio in record.ratios if ratio.effect is not None]
    if not ratios:
        return Said(question, "nothing could be compared", next="see the reasons above")
    open_, margin = [ratio for ratio in ratios if ratio.verdict == "not settled"], units.percent(record.budget.margin)
    if open_:
        names = ", ".join(ratio.contender for ratio in open_)
        verdict = f"not settled against {baseline}: {names}"
        why = "; ".join(f"{ratio.contender}: {speed(ratio)}" for ratio in open_)
        return Said(
            question,
            verdict,
            why,
            next=f"give it longer: --budget {round(4 * record.budget.seconds)}s, or end other work",
        )
    best = min(ratios, key=lambda ratio: ratio.effect or 1.0)
    if all(ratio.verdict == "the same" for ratio in ratios):
        verdict = f"no difference: all are as fast as {baseline} within {margin}"
        return Said(
            question,
            verdict,
            "; ".join(f"{r.contender}: {speed(r)}" for r in ratios),
            "choose by something else: memory, simplicity",
        )
    if best.verdict != "faster":
        slower = [ratio for ratio in ratios if ratio.verdict == "slower"]
        verdict = f"{baseline}; slower are {', '.join(ratio.contender for ratio in slower)}"
        return Said(question, verdict, where(baseline, slower[0].contender, windows), _next(baseline, record))
    verdict = f"{best.contender}, {speed(best)} as fast as {baseline}"
    return Said(question, verdict, where(best.contender, baseline, windows), _next(best.contender, record))


def _next(name: str, record: Record) -> str:
    """How to go on with the fastest."""
    entry = next(entry for entry in record.entries if entry.name == name)
    if entry.command:
        return f"go on with it: {shlex.join(entry.command)}"
    words = _plain(name)
    if "=" not in words and not words.endswith(".toml") and not entry.script:
        return f"lockstep show {words}"
    return " ".join(["lockstep run", *([record.common] if record.common else []), words])


def _plain(name: str) -> str:
    """Without the number of one that was named twice."""
    return re.sub(r" \(\d+\)$", "", name)


def _speeds(record: Record) -> list[AnyChart]:
    """All contenders side by side."""
    baseline, known = record.entries[0].name, [ratio for ratio in record.ratios if ratio.effect]
    rows = [
        Point(
            name=ratio.contender,
            colour=f"c{1 + number % 7}",
            value=sure(1 / (ratio.effect or 1.0)),
            low=short(1 / ratio.high) if ratio.high else None,
            high=short(1 / ratio.low) if ratio.low else None,
            text=speed(ratio),
        )
        for number, ratio in enumerate(known)
    ]
    if not rows:
        return []
    first = Point(name=baseline, colour="c0", value=1, text="1×, the baseline")
    says = f"Speed as a multiple of that of {baseline}, with its interval over the starts of the race."
    return [Points("speeds", "factor", "Speed", says, Axis("speed", "times"), [first, *rows])]


def _charts(record: Record, windows: Sequence[Window]) -> list[AnyChart]:
    """How the intervals shrank."""
    starts = sorted({window.start for window in windows})
    names = [ratio.contender for ratio in record.ratios]
    baseline = record.entries[0].name
    found: dict[str, list[tuple[int, Ratio]]] = {name: [] for name in names}
    for count in starts[estimate.LOOKS[0] - 1 :]:
        so_far = [window for window in windows if window.start <= count]
        for ratio in estimate.ratios(so_far, [(name, baseline) for name in names], record.budget.margin):
            if ratio.n == count and ratio.low and ratio.high:
                found[ratio.contender].append((count, ratio))
    series = [
        Series(
            name,
            f"c{number}",
            shorts(count for count, _ in points),
            shorts(1 / (ratio.effect or 1.0) for _, ratio in points),
            shorts(1 / (ratio.high or 1.0) for _, ratio in points),
            shorts(1 / (ratio.low or 1.0) for _, ratio in points),
        )
        for number, (name, points) in enumerate(found.items())
        if points
    ]
    if not series:
        return []
    says = f"Speed as a multiple of that of {baseline}, with its interval, after each start of the race."
    return [Lines("race", "speed", "How the race was settled", says, Axis("starts"), Axis("speed", "times"), series)]


def _notes(record: Record, windows: Sequence[Window]) -> list[str]:
    found = []
    if record.disturbed:
        taken = len({(window.start, window.round) for window in windows})
        found.append(f"{record.disturbed} of {taken} rounds were disturbed by other work, and were taken again.")
    busy = statistics.median(window.foreign for window in windows) if windows else 0.0
    if busy > BUSY:
        by_cpu = "; ".join(f"{ratio.contender}: {speed(ratio)}" for ratio in record.cpu_ratios)
        found.append(f"Other work took {units.percent(busy)} of the machine. By processor time: {by_cpu}.")
    foreign = [entry for entry in record.entries if entry.command]
    if foreign and not any(entry.images for entry in foreign):
        found.append("Steps are lines that the programs print, so these must mean the same amount of work.")
    # Which kernels compute a recipe changes no more than rounding.
    same = [replace(entry.recipe, fused="auto", compile=False) for entry in record.entries if not entry.command]
    if len({repr(recipe) for recipe in same}) > 1:
        found.append("The contenders do not compute the same: this compares speed alone, not what is learned.")
    return found


def lost(record: Record) -> str:
    """Why nothing could be compared."""
    name, reason = next(iter(record.failures.items()), ("", "nothing was measured"))
    return f"{name}: {reason}" if name else reason
