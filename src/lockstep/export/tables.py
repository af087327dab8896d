"""Runs as plain tables: one row per run, per epoch, or per step of a rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lockstep.measure.view import view
from lockstep.metrics import memory_of_a_rank
from lockstep.run import Run
from lockstep.settings import dotted

Row = dict[str, Any]
# Long lists that belong to a rank, not to a row.
_LEFT_OUT = ("memory_growth_bytes", "weights_sha256", "numbers")


def runs_table(runs: Iterable[Run]) -> list[Row]:
    """One row per run: its settings (recipe.*, placement.*) and its results."""
    return [_run_row(run) for run in runs]


def epochs_table(runs: Iterable[Run]) -> list[Row]:
    """One row per epoch, over all ranks."""
    return [{"run": run.id, **epoch} for run in runs for epoch in run.epochs()]


def steps_table(runs: Iterable[Run]) -> list[Row]:
    """One row per step of a rank; times in nanoseconds, as measured."""
    return [row for run in runs for row in _step_rows(run)]


def logged_table(runs: Iterable[Run]) -> list[Row]:
    """One row per value that an attached script has logged."""
    return [
        {"run": run.id, "step": step, "time": time, "name": each.name, "value": value}
        for run in runs
        for each in view(run).logged()
        for step, time, value in zip(each.steps, each.times, each.values, strict=True)
    ]


TABLES = {"runs": runs_table, "epochs": epochs_table, "steps": steps_table, "logged": logged_table}


def columns_of(rows: Sequence[Row]) -> list[str]:
    """Every key that any row has, in the order of their first appearance."""
    return list(dict.fromkeys(key for row in rows for key in row))


def _run_row(run: Run) -> Row:
    spec, status, summary = run.spec(), run.status(), run.summary() or {}
    recipe, placement = spec.known()
    return {
        "run": run.id,
        "state": status["state"],
        "cause": status.get("cause"),
        "created": spec.created,
        **cells({f"recipe.{key}": value for key, value in dotted(recipe).items()}),
        **cells({f"placement.{key}": value for key, value in dotted(placement).items()}),
        **{key: value for key, value in summary.items() if key not in _LEFT_OUT},
        "memory_growth_bytes": memory_of_a_rank(summary),
        "cpu": run.environment().get("cpu"),
    }


def _step_rows(run: Run) -> Iterator[Row]:
    found = view(run)
    for rank in range(found.ranks):
        rows = found.steps(rank)
        names = rows.dtype.names or ()
        for values in rows.tolist():
            yield {"run": run.id, "rank": rank, **dict(zip(names, values, strict=True))}


def cells(settings: Row) -> Row:
    """A list as text, since a table's cell holds one value."""
    return {key: " ".join(map(str, value)) if isinstance(value, list) else value for key, value in settings.items()}
