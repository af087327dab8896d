"""`lockstep runs`: the list of runs."""

from __future__ import annotations

import time
from pathlib import Path

import click

from lockstep import index
from lockstep.cli.options import json_option, runs_option
from lockstep.cli.output import note, print_json, print_table
from lockstep.run import runs_root
from lockstep.units import clock

FIGURES = ("train_seconds", "images_per_second")

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
    from lockstep.metrics import RECORDED

    shown = found if everything else found[-20:]
    # What a regression has instead of an accuracy.
    other = any(row["test_accuracy"] is None and row["test_loss"] is not None for row in shown)
    figures = ("test_accuracy", *(["test_loss"] if other else []), *FIGURES)
    if not found:
        note(f"no runs in {root}: start one with 'lockstep run', or name another folder with --runs")
        return
    print_table(
        ["id", "state", "ranks", "batch", "epochs", *(RECORDED[name].heading for name in figures), "age"],
        [
            [
                row["id"],
                row["state"],
                str(row["ranks"]),
                *("–" if row[name] is None else str(row[name]) for name in ("global_batch", "epochs")),
                *(RECORDED[name].text(row[name]) for name in figures),
                clock(max(0.0, time.time() - row["created"])),
            ]
            for row in shown
        ],
        right=tuple(range(2, 6 + len(figures))),
        spare=(4, 3, 2),
    )
    if len(shown) < len(found):
        note(f"the newest {len(shown)} of {len(found)}; --all lists every one")
