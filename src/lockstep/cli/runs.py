"""`lockstep runs`: the list of runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from lockstep.cli.output import json_option, note, print_json, print_table
from lockstep.cli.run import runs_option
from lockstep.run import Run, list_runs, read_json, runs_root

EPILOG = """\b
Examples:
  lockstep runs
  lockstep runs --all --json
"""


@click.command("runs", epilog=EPILOG)
@runs_option
@click.option("--all", "everything", is_flag=True, help="All of them, not only the newest 20.")
@json_option
def command(runs: Path | None, everything: bool, as_json: bool) -> None:
    """List the runs, newest last."""
    root = runs_root(runs)
    found = list_runs(root)
    shown = found if everything or as_json else found[-20:]
    rows = [line(run) for run in shown]
    if as_json:
        print_json(rows)
        return
    if not found:
        note(f"no runs in {root}: start one with 'lockstep run', or name another folder with --runs")
        return
    print_table(
        ["id", "state", "ranks", "batch", "epochs", "test acc", "train s", "images/s", "age"],
        [
            [
                row["id"],
                row["state"],
                str(row["ranks"]),
                str(row["global_batch"]),
                str(row["epochs"]),
                _number(row["test_accuracy"], "{:.2%}"),
                _number(row["train_seconds"], "{:.1f}"),
                _number(row["images_per_second"], "{:,.0f}"),
                _age(row["created"]),
            ]
            for row in rows
        ],
        right=(2, 3, 4, 5, 6, 7, 8),
    )
    if len(shown) < len(found):
        note(f"the newest {len(shown)} of {len(found)}; --all lists every one")


def line(run: Run) -> dict[str, Any]:
    """What the list says of one run; one that cannot be read is listed as such, not passed over."""
    spec = read_json(run.folder / "run.json")
    if spec is None or "plan" not in spec:
        empty = dict.fromkeys(
            ("ranks", "global_batch", "epochs", "test_accuracy", "train_seconds", "images_per_second")
        )
        return {"id": run.id, "state": "unreadable", "created": 0.0, **empty}
    summary = run.summary() or {}
    return {
        "id": run.id,
        "state": run.status()["state"],
        "created": spec["created"],
        "model": spec["recipe"]["model"],
        "data": spec["recipe"]["data"],
        "launcher": spec["placement"]["launcher"],
        "ranks": spec["plan"]["ranks"],
        "global_batch": spec["plan"]["global_batch"],
        "epochs": summary.get("epochs"),
        "test_accuracy": summary.get("test_accuracy"),
        "train_seconds": summary.get("train_seconds"),
        "images_per_second": summary.get("images_per_second"),
    }


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def _age(created: float) -> str:
    seconds = max(0.0, time.time() - created)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
