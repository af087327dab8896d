"""Planted causes in scripts of the real frameworks: does `lockstep attach` with `explain` name each first, and does TraceML?

25 causes in plain PyTorch, DDP, Lightning, Accelerate and transformers, and one script of each kind in which nothing is planted. Sizes are not
judged, so it may run on a machine that does other work. What has been executed is kept until the section is whole.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks import parts
from benchmarks.processes import ContenderFailed
from benchmarks.record import Measurement, Section
from benchmarks.settings import Settings
from benchmarks.suspects import execute, peer
from benchmarks.suspects.causes import CAUSES, NOTHING, Cause

GOAL = 24
Row = dict[str, Any]
WHO: tuple[tuple[str, Callable[[Cause], Row]], ...] = (("Lockstep", execute.executed), (peer.NAME, peer.executed))


def measure(settings: Settings) -> Section:
    section = Section(
        "attach", "Planted causes in scripts of the real frameworks: which is named first", "runs", "rate", []
    )
    wanted = CAUSES[::6] if settings.quick else CAUSES
    rows = {who: [_kept(who, run, cause) for cause in (*wanted, *NOTHING)] for who, run in WHO}
    for who, mine in rows.items():
        planted, nothing = mine[: len(wanted)], mine[len(wanted) :]
        first, quiet = (sum(bool(row.get("right")) for row in some) for some in (planted, nothing))
        goal = (
            f" (goal {GOAL}: {'met' if first >= GOAL else 'missed'})"
            if who == "Lockstep" and not settings.quick
            else ""
        )
        section.notes.append(f"{who}: {first} of {len(planted)} causes are named first{goal}.")
        section.notes.append(
            f"{who}: nothing is named in {quiet} of {len(nothing)} scripts in which nothing is planted."
        )
    section.notes.append(
        f"What other programs did to Lockstep's runs ({', '.join(execute.MACHINE)}) counts only where it was planted."
    )
    for number, cause in enumerate((*wanted, *NOTHING)):
        said = "; ".join(f"{who}: {_said(mine[number])}" for who, mine in rows.items())
        section.notes.append(f"{cause.name} ({cause.script}): {said}.")
    for who, mine in rows.items():
        for row in mine:
            name, order = f"{who}: {row['cause']}", len(section.measurements) + 1
            if "failed" in row and who == "Lockstep":
                section.refuse(f"{name} failed: {row['failed']}")
            section.measurements.append(Measurement(order, 1, name, 1, row["seconds"], 0.0, row))
    return section


def _kept(who: str, run: Callable[[Cause], Row], cause: Cause) -> Row:
    return parts.kept("attach", f"{who}: {cause.name}", partial(_one, who, run, cause))


def _one(who: str, run: Callable[[Cause], Row], cause: Cause) -> Row:
    began = time.perf_counter()
    try:
        row = run(cause)
    except ContenderFailed as error:
        row = {"cause": cause.name, "failed": str(error)}
    row["seconds"] = round(time.perf_counter() - began, 1)
    print(f"[attach] {who}: {cause.name}: {_said(row)} ({row['seconds']} s)", file=sys.stderr, flush=True)
    return row


def _said(row: Row) -> str:
    if "failed" in row:
        return f"failed: {row['failed']}"
    return f"{'right' if row['right'] else 'wrong'}, {row['first'] or 'nothing'}"
