"""A race as a part of the document: one row a contender, what is settled, why, and what to do next."""

from __future__ import annotations

import re
import shlex
import statistics
from collections.abc import Sequence

from msgspec.structs import replace

from lockstep import units
from lockstep.machine import starving
from lockstep.report import doubt
from lockstep.report.alone import ANSWER
from lockstep.report.answers import Difference, Way, sentence
from lockstep.report.spoken import names
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
from lockstep.study import reasons
from lockstep.turns import estimate
from lockstep.turns.estimate import Ratio, Window
from lockstep.turns.folder import Record
from lockstep.turns.where import phases

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
        headlines=answers(record, windows),
        notes=_notes(record, windows),
        charts=[*_speeds(record), *_charts(record, windows)],
        environment=_environment(record),
        commands=[Command("race", [_again(record, record.budget.seconds)])],
    )


def _environment(record: Record) -> Table:
    facts = [("processor", record.cpu), ("Lockstep", record.lockstep), *record.machine.items()]
    return Table("environment", "Environment", "", ["", ""], [[Cell(name), Cell(value)] for name, value in facts])


def _again(record: Record, seconds: float) -> str:
    words = shlex.join(_plain(entry.name) for entry in record.entries)
    common = f" --all {shlex.quote(record.common)}" if record.common else ""
    return f"lockstep race {words}{common} --budget {seconds:g}s --until {100 * record.budget.margin:g}%"


def table(record: Record, windows: Sequence[Window]) -> Table:
    ratios = {ratio.contender: ratio for ratio in record.ratios}
    starved = bool(disturbed(windows))
    rows = [
        _row(entry.name, ratios.get(entry.name), record, [w for w in windows if w.contender == entry.name], starved)
        for entry in record.entries
    ]
    what = "lines" if any(entry.command and not entry.images for entry in record.entries) else "samples"
    says = f"speed: {what} per second as a multiple of the first contender's, from ratios within rounds; the interval is over its starts, of which there are n."
    columns = [column.replace("samples", what) for column in COLUMNS]
    below = doubt.note(rows, starved)
    return Table("race", "Contenders", says, columns, rows, right=RIGHT, spare=SPARE, below=below)


def _row(name: str, ratio: Ratio | None, record: Record, mine: Sequence[Window], starved: bool) -> list[Cell]:
    if reason := record.failures.get(name):
        return [Cell(name), Cell("failed", notes=[reason]), *[Cell("–")] * 5]
    if not mine:
        return [Cell(name), Cell("starting"), *[Cell("–")] * 5]
    cost = statistics.median(window.cost("wall") for window in mine)
    step = statistics.median(window.wall / window.steps for window in mine)
    exchange = _exchange(mine)
    first = name == record.entries[0].name
    verdict = "baseline" if first else ratio.verdict if ratio else "not settled"
    starts = len({window.start for window in mine})
    return [
        Cell(name),
        Cell(doubt.doubted(verdict, starved), faint=verdict in ("not settled", "baseline")),
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
    starts = units.counted(record.starts, "start")
    contenders = (
        f"{units.counted(len(record.entries), 'contender')}, {starts} of each, {units.duration(record.seconds)}"
    )
    return contenders if record.over else f"{contenders}, not over"


def answers(record: Record, windows: Sequence[Window]) -> list[Said]:
    """One sentence for each contender against the first, the fastest first; why; and below the last one what to type next."""
    baseline = record.entries[0]
    spoken = names([entry.name for entry in record.entries], baseline.name)
    ratios = sorted(
        (ratio for ratio in record.ratios if ratio.effect is not None), key=lambda ratio: ratio.effect or 1.0
    )
    found = disturbed(windows)
    beside = starving.BESIDE if found else ""
    for ratio in ratios:
        command = any(entry.command for entry in record.entries if entry.name in (ratio.contender, baseline.name))
        text = sentence(*spoken[ratio.contender], _difference(ratio), [], "run" if command else "train")
        found.append(
            Said(ANSWER, beside + text, _why(ratio, record, windows) if ratio.verdict in ("faster", "slower") else "")
        )
    if ratios:
        found[-1] = replace(found[-1], next=next_step(record, windows))
    else:
        found.append(Said(ANSWER, "nothing could be compared"))
    return found + [Said("failed", f"{name} failed", why) for name, why in record.failures.items()]


def _why(ratio: Ratio, record: Record, windows: Sequence[Window]) -> str:
    ours, theirs = (next(e for e in record.entries if e.name == name) for name in (ratio.contender, ratio.baseline))
    cores, others = (entry.placement.ranks * (entry.placement.threads or 1) for entry in (ours, theirs))
    alike = not (ours.command or theirs.command) and replace(ours.recipe, global_batch=1) == replace(
        theirs.recipe, global_batch=1
    )
    both = phases(ratio.contender, ratio.baseline, windows) or ({}, {})
    there = int(record.machine.get("cores") or 0)
    return reasons.of_difference(
        reasons.Side(cores, both[0]),
        reasons.Side(others, both[1]),
        ratio.verdict == "faster",
        alike,
        there or None,
        bool(disturbed(windows)),
    )


def _exchange(mine: Sequence[Window]) -> float:
    return statistics.median(window.phases.get("exchange", 0.0) / window.wall for window in mine)


def _difference(ratio: Ratio) -> Difference:
    """A race compares times of a sample; people ask how fast."""
    ways: dict[str, Way] = {"faster": "less", "slower": "more", "the same": "same"}
    assert ratio.effect is not None
    way = ways.get(ratio.verdict, "open")
    return Difference("speed", "rate", way, ratio.effect, ratio.low, ratio.high, ratio.n, "start").inverse()


def next_step(record: Record, windows: Sequence[Window], where: str = "") -> str:
    """The same again where other work had the machine, more time for what is open, else on with the fastest. `where`: words for the runs' folder."""
    ratios = [ratio for ratio in record.ratios if ratio.effect is not None]
    if disturbed(windows):
        return f"{_again(record, record.budget.seconds)}{where} ({starving.AGAIN})"
    if any(ratio.verdict == "not settled" for ratio in ratios):
        return f"{_again(record, 4 * record.budget.seconds)}{where}"
    best = min(ratios, key=lambda ratio: ratio.effect or 1.0)
    told = _next(best.contender if best.verdict == "faster" else record.entries[0].name, record)
    return f"{told}{where}" if told.startswith("lockstep ") else told


def disturbed(windows: Sequence[Window]) -> list[Said]:
    """That other work had the machine meanwhile: contenders lose unequally by it. Of foreign programs only the machine's own share is known."""
    had, taken = estimate.cores_had(windows), _taken(windows)
    if had is not None and starving.starved(had):
        return [Said("machine", starving.sentence(had), starving.UNEQUAL, starving.ADVICE)]
    if had is None and taken > BUSY:
        return [Said("machine", _others_took(taken), "", starving.ADVICE)]
    return []


def busy(windows: Sequence[Window]) -> str:
    """The same in words; empty where it had not."""
    if found := disturbed(windows):
        return found[0].verdict
    taken = _taken(windows)
    return _others_took(taken) if taken > BUSY else ""


def _others_took(share: float) -> str:
    return f"other work took {units.percent(share)} of the machine"


def _taken(windows: Sequence[Window]) -> float:
    """The share of the machine's time that other work took."""
    return statistics.median(window.foreign for window in windows) if windows else 0.0


def _next(name: str, record: Record) -> str:
    """How to go on with the fastest."""
    entry = next(entry for entry in record.entries if entry.name == name)
    if entry.command:
        return shlex.join(entry.command)
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
            f"c{1 + number % 7}",
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
        found.append(
            f"{record.disturbed} of {units.counted(taken, 'round')} {'was' if record.disturbed == 1 else 'were'} disturbed by other work, and taken again."
        )
    share = _taken(windows)
    if share > BUSY:
        by_cpu = "; ".join(f"{ratio.contender}: {speed(ratio)}" for ratio in record.cpu_ratios)
        found.append(f"Other work took {units.percent(share)} of the machine. By processor time: {by_cpu}.")
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
