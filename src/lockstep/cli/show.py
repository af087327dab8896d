"""`lockstep show`: one run, its results, where the time went, every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from lockstep import shapes
from lockstep.cli.options import complete_run, json_option, plot_option, runs_option
from lockstep.cli.output import console, next_step, place, print_json, print_table, styled
from lockstep.errors import InputError
from lockstep.reading import Damaged, read_record
from lockstep.run import OVER, Run, runs_root

# Lines of the table of operators.
MOST_OPERATORS = 25

EPILOG = """\b
Examples:
  lockstep show last
  lockstep show 20260101-1200 --ranks
  lockstep show runs/my-run --json
  lockstep show last --operators             of a run with --profile: torch's operators by their own time
"""


@click.command("show", epilog=EPILOG)
@click.argument("run", default="last", shell_complete=complete_run)
@runs_option
@click.option("--ranks", is_flag=True, help="Show every rank by itself.")
@click.option("--operators", is_flag=True, help="Show the operators of the first rank that torch's profiler saw.")
@plot_option
@json_option
def command(run: str, runs: Path | None, ranks: bool, operators: bool, plot: bool, as_json: bool) -> None:
    """Show one run (an id, its beginning or end, a tag, a folder, 'last' or 'last~1')."""
    found = Run.find(run, runs_root(runs))
    if operators:
        _operators(found, as_json)
    elif as_json:
        print_json(document(found))
    else:
        print_run(found, ranks, plot)
        if decided := found.spec().decisions():
            console().print("\nwhat Lockstep decided")
            print_table(["setting", "value", "why"], [list(row) for row in decided])
        next_of(found, runs)


def _operators(run: Run, as_json: bool) -> None:
    """What `lockstep run --profile` has left; the same columns as in torch's own table, which is beside it as text."""
    from lockstep.measure.profile import OPERATORS

    try:
        content = read_record(run.rank_folder(0) / OPERATORS, shapes.Operators)
    except Damaged as error:
        raise Damaged(f"run {run.id} is damaged: ranks/0000/{error}") from None
    if content is None:
        raise InputError(f"run {run.id} has no table of operators: run it again with --profile 5")
    if as_json:
        print_json(content)
        return
    rows = content["operators"][:MOST_OPERATORS]
    print_table(
        ["operator", "self CPU %", "self CPU ms", "CPU total ms", "memory MB", "calls"],
        [
            [
                row["name"],
                f"{row['self_cpu_share']:.1%}",
                f"{row['self_cpu_us'] / 1e3:.2f}",
                f"{row['cpu_total_us'] / 1e3:.2f}",
                f"{row['cpu_memory_bytes'] / 1e6:.2f}",
                f"{row['calls']:,}",
            ]
            for row in rows
        ],
        right=range(1, 6),
        spare=(4, 3),
    )
    last = content["first_step"] + content["steps"] - 1
    also = "".join(f" and the {name} between them" for name in dict.fromkeys(content["between"]))
    left = len(content["operators"]) - len(rows)
    more = f"; {left} more with --json" if left else ""
    console().print(f"rank 0, steps {content['first_step']} to {last}{also}, by self CPU time{more}")


def document(run: Run) -> dict[str, Any]:
    """All that is known of a run, as one JSON document."""
    from lockstep.measure.view import view

    run = view(run)
    spec, status = run.spec(), run.status()
    return {
        "run": str(run.folder),
        "id": run.id,
        **status,
        **(run.summary() or {}),
        "damaged": [*run.damage(), *run.rank_damage()],
        "epochs": run.epochs(),
        "plan": msgspec.to_builtins(spec.plan),
        "recipe": msgspec.to_builtins(spec.recipe),
        "placement": msgspec.to_builtins(spec.placement),
        "phases": run.phases(),
        "ranks": [{"epochs": run.epochs(beat["rank"]), **beat} for beat in run.rank_statuses()],
        "model_notes": {kind: run.model_notes(kind) for kind in ("remarks", "cautions")},
        "environment": run.environment(),
        "why": spec.why,
        "command": spec.command,
        "data_origin": spec.data_origin,
    }


def next_of(run: Run, runs: Path | None) -> None:
    """How to go on with a run, by how it ended."""
    state, spec = run.status()["state"], run.spec()
    if _job_goes_on(run):
        next_step(f"lockstep follow {run.id}{place(runs)} (shows its progress, and how it ends)")
    elif state == "done":
        next_step(
            f"lockstep explain {run.id}{place(runs)} (where its time went, and what to do about it); "
            f"lockstep report {run.id}{place(runs)} (curves and timeline as a page)"
        )
    elif state in ("failed", "cancelled", "stalled") and run.has_checkpoint:
        next_step(f"lockstep run --resume {run.id}{place(runs)} (goes on from its last checkpoint)")
    elif state == "failed" and not spec.options.attached:
        next_step(f"what its ranks said is in {run.folder}/ranks")


def _job_goes_on(run: Run) -> bool:
    """Whether it is a Slurm job of which nobody knows the end. Ranks are silent while it waits for another turn."""
    from lockstep.launch.slurm.launcher import submitted

    return run.recorded_status()["state"] not in OVER and submitted(run) is not None


def print_run(run: Run, ranks: bool, plot: bool = False) -> None:
    """The run's part of the report's document, without what `explain` and `report` are for."""
    from lockstep.report import curves, steps, terminal
    from lockstep.report.document import part
    from lockstep.report.subject import of_runs

    found = part(of_runs([run]), (curves, steps) if plot else (), details=False)
    if not ranks:
        found = msgspec.structs.replace(found, tables=[table for table in found.tables if table.id != "ranks"])
    out = console()
    terminal.draw(found, out, plot)
    out.print(styled((str(run.folder), "dim")), soft_wrap=True)
