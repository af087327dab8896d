"""What runs have to tell, as plain tables: one row a run, an epoch, or a step of a rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from lockstep.measure.records import read_steps
from lockstep.run import Run
from lockstep.settings import flatten

Row = dict[str, Any]
# Long lists that belong to a rank, not to a line.
_LEFT_OUT = ("memory_growth_bytes", "weights_sha256", "numbers")


def runs_table(runs: Iterable[Run]) -> list[Row]:
    """One row a run: what it was asked to do (recipe.*, placement.*), and what came of it."""
    return [_run_row(run) for run in runs]


def epochs_table(runs: Iterable[Run]) -> list[Row]:
    """One row an epoch, over all ranks."""
    return [{"run": run.id, **epoch} for run in runs for epoch in run.epochs()]


def steps_table(runs: Iterable[Run]) -> list[Row]:
    """One row a step of a rank; times in nanoseconds, as they were measured."""
    return [row for run in runs for row in _step_rows(run)]


TABLES = {"runs": runs_table, "epochs": epochs_table, "steps": steps_table}


def columns_of(rows: Sequence[Row]) -> list[str]:
    """Every key that any row has, in the order of their first appearance."""
    return list(dict.fromkeys(key for row in rows for key in row))


def _run_row(run: Run) -> Row:
    spec, status, summary = run.spec(), run.status(), run.summary() or {}
    known = [value for value in summary.get("memory_growth_bytes") or [] if value is not None]
    return {
        "run": run.id,
        "state": status["state"],
        "cause": status.get("cause"),
        "created": spec.created,
        **_cells("recipe", spec.recipe),
        **_cells("placement", spec.placement),
        **{key: value for key, value in summary.items() if key not in _LEFT_OUT},
        "memory_growth_bytes": max(known) if known else None,
        "cpu": run.environment().get("cpu"),
    }


def _step_rows(run: Run) -> Iterator[Row]:
    for rank in range(run.spec().plan.ranks):
        rows = read_steps(run.rank_folder(rank) / "steps.bin")
        names = rows.dtype.names or ()
        for values in rows.tolist():
            yield {"run": run.id, "rank": rank, **dict(zip(names, values, strict=True))}


def _cells(table: str, settings: Any) -> Row:
    """Settings by dotted names; a list as text, since a table's cell holds one value."""
    flat = flatten({table: msgspec.to_builtins(settings)})
    return {key: " ".join(map(str, value)) if isinstance(value, list) else value for key, value in flat.items()}
