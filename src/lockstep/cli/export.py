"""`lockstep export`: runs as tables for other tools."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lockstep.cli.options import complete_run, runs_option
from lockstep.cli.output import check_output, next_step, note, place, writing
from lockstep.errors import InputError
from lockstep.run import Run, runs_root
from lockstep.units import counted

if TYPE_CHECKING:
    from lockstep.export.facts import Chosen
    from lockstep.export.writers import Store

FOLDERS = ("mlflow", "tensorboard", "wandb", "trackio", "hta")
# The timeline of one run (docs/timeline.md).
TIMELINES = ("perfetto", "hta")

EPILOG = """\b
Examples:
  lockstep export last -o run.csv                       one row, every setting and result
  lockstep export batch-size --what epochs -o curves.csv
  lockstep export last --what steps -o steps.parquet    every step of every rank
  lockstep export batch-size --format mlflow -o tracked       then: mlflow ui --backend-store-uri …
  lockstep export batch-size --format tensorboard -o board    then: tensorboard --logdir board
  lockstep export batch-size --format wandb -o offline        then: wandb sync …; also trackio
  lockstep export last --format perfetto -o trace.json     the timeline of a run with --trace

For its curves alone TensorBoard needs no export: tensorboard --logdir runs
"""


@click.command("export", epilog=EPILOG)
@click.argument("names", nargs=-1, required=True, metavar="RUN|STUDY...", shell_complete=complete_run)
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="The file to write; for mlflow, tensorboard, wandb, trackio and hta, the folder.",
)
@click.option(
    "--what", type=click.Choice(["runs", "epochs", "steps", "logged"]), default="runs", help="A row for each …"
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["csv", "json", "parquet", "perfetto", *FOLDERS]),
    help="By default, what the file's ending says.",
)
@runs_option
def command(names: tuple[str, ...], output: Path, what: str, form: str | None, runs: Path | None) -> None:
    """Write runs, or those of a study, as a table, or as a store that other tools open."""
    from lockstep.export import writers
    from lockstep.export.facts import Chosen
    from lockstep.export.tables import TABLES
    from lockstep.study.folder import StudyFolder
    from lockstep.study.gather import of_study

    table = form or output.suffix.removeprefix(".")
    if table not in writers.WRITERS and form not in (*FOLDERS, *TIMELINES):
        raise InputError(f"-o {output}: its ending says no format; add --format csv, json or parquet")
    check_output(output, form in FOLDERS)
    found: list[Chosen] = []
    for name in names:
        study = StudyFolder.find(name, runs) if name != "last" else None  # 'last' is the last run, as with show
        if study:
            cells = of_study(study, study.read())
            found += [Chosen(one.run, study.name, cell.name) for cell in cells for one in cell.samples if one.own]
        else:
            found += [Chosen(run) for run in Run.find_all(name, runs_root(runs))]
    with writing(output):
        if table in writers.WRITERS:
            rows = TABLES[what]([one.run for one in found])
            writers.WRITERS[table](rows, output)
            note(f"{counted(len(rows), 'row')} in {output}")
            next_step(f"lockstep report {shlex.join(names)}{place(runs)} (the same as a page)")
        else:
            store = _write_store(table, found, output)
            note(store.done)
            next_step(store.next)


def _write_store(form: str, found: list[Chosen], output: Path) -> Store:
    from lockstep.export import mlflow, perfetto, tensorboard, trackio, wandb

    given = click.get_current_context().get_parameter_source("what")
    if given is click.core.ParameterSource.COMMANDLINE:
        raise InputError(f"--what chooses the rows of a table, and --format {form} writes none: leave it out")
    if form not in TIMELINES:
        trackers = {
            "mlflow": mlflow.write,
            "tensorboard": tensorboard.write,
            "wandb": wandb.write,
            "trackio": trackio.write,
        }
        return trackers[form](found, output)
    if len(found) != 1:
        raise InputError(f"--format {form}: a timeline is of one run, and these are {len(found)}; name one")
    return {"perfetto": perfetto.write, "hta": perfetto.write_for_hta}[form](found[0].run, output)
