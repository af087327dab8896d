"""Planted causes: does `lockstep explain` name each one first, and how far is the size that it states from the true one?

Ten causes in four sizes are really planted into real trainings (benchmarks/planted/), and so is nothing. TraceML gets the same causes in
plain PyTorch. What has been executed is kept until the section is whole, so it can be stopped and goes on.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.planted import peer, score
from benchmarks.record import Measurement, Section
from benchmarks.settings import Settings

# Of each cell; a cell takes about 25 s.
MOST_REPEATS = 3


def measure(settings: Settings) -> Section:
    section = Section("explain", "Planted causes, as `lockstep explain` and TraceML see them", "runs", "rate", [])
    repeats = min(MOST_REPEATS, settings.repeats)
    sizes = score.SIZES[-1:] if settings.quick else score.SIZES
    mine = score.execute(list(score.cells(repeats, sizes=sizes)))
    theirs = score.execute(score.peer_cells(repeats), peer.executed, peer.NAME)
    for prefix, rows in (("", mine), (f"{peer.NAME}: ", theirs)):
        section.notes += [f"{prefix}{note}" for note in score.notes(rows)]
        _add(section, prefix, rows)
    section.notes.sort(key=lambda note: score.GOAL not in note)  # what it comes to, then cell by cell
    section.notes.append(
        f"{peer.NAME} was not asked about {' and '.join(peer.LEFT_OUT)}, and has no verdict about exchange, buckets or threads."
    )
    return section


def _add(section: Section, prefix: str, rows: Sequence[score.Row]) -> None:
    times: dict[str, int] = {}
    for row in rows:
        name = f"{prefix}{row['cause']}, {row['planted']:.0%}"
        times[name] = times.get(name, 0) + 1
        if "failed" in row:
            section.refuse(f"{name} failed: {row['failed']}")
            continue
        order = len(section.measurements) + 1
        section.measurements.append(Measurement(order, times[name], name, 1, row["seconds"], 0.0, row))
