"""`lockstep runs`: the list of runs."""

from __future__ import annotations

import time
from pathlib import Path

import click

from lockstep import index
from lockstep.cli.output import json_option, note, print_json, print_table
from lockstep.cli.run import runs_option
from lockstep.run import runs_root

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
    found = index.rows(root)
    if as_json:
        print_json(found)
        return
    shown = found if everything else found[-20:]
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
            for row in shown
        ],
        right=(2, 3, 4, 5, 6, 7, 8),
    )
    if len(shown) < len(found):
        note(f"the newest {len(shown)} of {len(found)}; --all lists every one")


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def _age(created: float) -> str:
    seconds = max(0.0, time.time() - created)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
