"""Executes what has not been executed yet, one piece at a time: `python -m benchmarks.planted.score --cause 'slow loader' --size 0.1 --repeats 3`.

Each execution is a part of the section `explain` (benchmarks/parts.py): it is kept as soon as it is over, and the section goes on from there.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from benchmarks import parts, stats
from benchmarks.planted import execute as ours
from benchmarks.planted import peer
from benchmarks.planted.causes import CAUSES, NOTHING, SIZES, Cause
from benchmarks.processes import ContenderFailed

# With nothing planted, for each repeat of the others.
NOTHINGS = 4
FROM, FIRST_IN, WITHIN, NOTHING_IN = 0.1, 0.95, 0.2, 0.95
GOAL = "(goal "
"""What a note has that says whether one was met."""

Row = dict[str, Any]
Execute = Callable[[Cause, float], Row]


def cells(repeats: int, causes: Sequence[str] = (), sizes: Sequence[float] = SIZES) -> Iterator[tuple[Cause, float]]:
    """Round by round, so that all causes have been tried when it is stopped."""
    for _ in range(repeats):
        for size in sizes:
            yield from ((cause, size) for cause in CAUSES if not causes or cause.name in causes)
        if not causes or NOTHING.name in causes:
            yield from [(NOTHING, 0.0)] * NOTHINGS


def peer_cells(repeats: int, causes: Sequence[str] = ()) -> list[tuple[Cause, float]]:
    """What the peer is asked for: the sizes that have a goal, and what runs on one host."""
    wanted = cells(repeats, causes, [size for size in SIZES if size >= FROM])
    return [(cause, size) for cause, size in wanted if cause.name not in peer.LEFT_OUT]


def execute(wanted: Sequence[tuple[Cause, float]], run: Execute = ours.executed, who: str = "lockstep") -> list[Row]:
    """All of these, but for those that are kept already."""
    times: Counter[tuple[str, float]] = Counter()
    rows = []
    for number, (cause, size) in enumerate(wanted, 1):
        times[cause.name, size] += 1
        part = f"{who}: {cause.name}, {size}, {times[cause.name, size]}"
        rows.append(parts.kept("explain", part, partial(_one, run, cause, size, f"{number}/{len(wanted)}")))
    return rows


def _one(run: Execute, cause: Cause, size: float, number: str) -> Row:
    began = time.perf_counter()
    try:
        row = run(cause, size)
    except ContenderFailed as error:
        row = {"cause": cause.name, "planted": size, "failed": str(error)}
    row["seconds"] = round(time.perf_counter() - began, 1)
    print(f"[explain] {number} {one_line(row)}", file=sys.stderr, flush=True)
    return row


def one_line(row: Row) -> str:
    if "failed" in row:
        return f"{row['cause']}, {row['planted']:.0%}: failed: {row['failed']}"
    stated = "not named" if row["stated"] is None else f"said to be {row['stated']:.1%}"
    return (
        f"{row['cause']}, {row['planted']:.0%}, truly {row['true']:.1%}: {stated}, first is "
        f"{row['first'] or 'nothing'} ({row['seconds']} s)"
    )


def off(row: Row) -> float | None:
    """How far the stated size is from the true one, as a share of it; None where it was not stated."""
    return None if row["stated"] is None or row["true"] <= 0 else abs(row["stated"] / row["true"] - 1)


def notes(rows: Sequence[Row]) -> list[str]:
    """The scores: overall, then cell by cell."""
    whole = [row for row in rows if "failed" not in row]
    found = [
        f"{cause.name}, planted {size:.0%}: {_cell(mine)}."
        for cause in CAUSES
        for size in SIZES
        if (mine := _of(whole, cause, size))
    ]
    return [*_goals(whole), *found]


def _of(rows: Sequence[Row], cause: Cause, size: float) -> list[Row]:
    return [row for row in rows if (row["cause"], row["planted"]) == (cause.name, size)]


def _goals(rows: Sequence[Row]) -> Iterator[str]:
    large = [row for row in rows if row["cause"] != NOTHING.name and row["true"] >= 0.9 * FROM]
    if large:
        first = sum(row["named_first"] for row in large)
        near = sum((each := off(row)) is not None and each <= WITHIN for row in large)
        yield _goal(
            f"Causes that truly take {FROM:.0%} or more (or almost) are named first", first, len(large), FIRST_IN
        )
        yield _goal(f"Their size is stated within {WITHIN:.0%} of itself", near, len(large), FIRST_IN)
    nothing = [row for row in rows if row["cause"] == NOTHING.name]
    if nothing:
        quiet = sum(not row["first"] for row in nothing)
        yield _goal("Nothing is named where nothing is planted", quiet, len(nothing), NOTHING_IN)


def _goal(text: str, met: int, count: int, goal: float) -> str:
    return f"{text}: {met} of {count} {GOAL}{goal:.0%}: {'met' if met >= goal * count else 'missed'})."


def _cell(rows: Sequence[Row]) -> str:
    first = sum(row["named_first"] for row in rows)
    true = stats.median([row["true"] for row in rows])
    stated = [row["stated"] for row in rows if row["stated"] is not None]
    sizes = [each for row in rows if (each := off(row)) is not None]
    said = (
        f"said to be {stats.median(stated):.1%}, off by {stats.median(sizes):.0%} of itself"
        if sizes
        else "no size stated"
    )
    wrong = sorted({row["first"] or "nothing" for row in rows if not row["named_first"]})
    instead = f" (else {', '.join(wrong)})" if wrong else ""
    return f"named first in {first} of {len(rows)}{instead}; truly {true:.1%}, {said}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planted.score", description=__doc__.partition("\n")[0])
    names = [cause.name for cause in (*CAUSES, NOTHING)]
    parser.add_argument("--cause", action="append", default=[], choices=names)
    parser.add_argument("--size", action="append", type=float, choices=SIZES)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peer", action="store_true", help="TraceML instead of Lockstep")
    words = parser.parse_args()
    if words.peer:
        rows = execute(peer_cells(words.repeats, words.cause), peer.executed, peer.NAME)
    else:
        rows = execute(list(cells(words.repeats, words.cause, words.size or SIZES)))
    print("\n".join(notes(rows)))


if __name__ == "__main__":
    main()
