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
from benchmarks.suspects.causes import CAUSES, HELD_OUT, HELD_OUT_NOTHING, NOTHING, Cause

GOAL = 24
Row = dict[str, Any]
Who = tuple[tuple[str, Callable[[Cause], Row]], ...]
OURS: Who = (("Lockstep", execute.executed),)
BOTH: Who = (*OURS, (peer.NAME, peer.executed))


def measure(settings: Settings) -> Section:
    section = Section(
        "attach", "Planted causes in scripts of the real frameworks: which is named first", "runs", "rate", []
    )
    wanted = CAUSES[::6] if settings.quick else CAUSES
    return _filled(section, wanted, NOTHING, BOTH, None if settings.quick else GOAL)


def measure_held_out(settings: Settings) -> Section:
    """Causes in other scripts than those that the rules were made on. TraceML would need lines added to them."""
    section = Section("attach-held-out", "Planted causes in scripts that no rule was made on", "runs", "rate", [])
    wanted = HELD_OUT[::6] if settings.quick else HELD_OUT
    return _filled(section, wanted, HELD_OUT_NOTHING, OURS, None)


def _filled(
    section: Section, wanted: tuple[Cause, ...], unplanted: tuple[Cause, ...], who: Who, least: int | None
) -> Section:
    asked = (*wanted, *unplanted)
    rows = {name: [_kept(section.name, name, run, cause) for cause in asked] for name, run in who}
    for name, mine in rows.items():
        planted, nothing = mine[: len(wanted)], mine[len(wanted) :]
        first, quiet = (sum(bool(row.get("right")) for row in some) for some in (planted, nothing))
        goal = f" (goal {least}: {'met' if first >= least else 'missed'})" if name == "Lockstep" and least else ""
        section.notes.append(f"{name}: {first} of {len(planted)} causes are named first{goal}.")
        section.notes.append(
            f"{name}: nothing is named in {quiet} of {len(nothing)} scripts in which nothing is planted."
        )
    section.notes.append(
        f"What other programs did to Lockstep's runs ({', '.join(execute.MACHINE)}) counts only where it was planted."
    )
    for number, cause in enumerate(asked):
        said = "; ".join(f"{name}: {_said(mine[number])}" for name, mine in rows.items())
        section.notes.append(f"{cause.name} ({cause.script}): {said}.")
    for name, mine in rows.items():
        for row in mine:
            contender, order = f"{name}: {row['cause']}", len(section.measurements) + 1
            if "failed" in row and name == "Lockstep":
                section.refuse(f"{contender} failed: {row['failed']}")
            section.measurements.append(Measurement(order, 1, contender, 1, row["seconds"], 0.0, row))
    return section


def _kept(section: str, who: str, run: Callable[[Cause], Row], cause: Cause) -> Row:
    return parts.kept(section, f"{who}: {cause.name}", partial(_one, who, run, cause))


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
