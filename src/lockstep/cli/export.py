"""`lockstep export`: runs as tables for other tools."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from lockstep.cli.output import note
from lockstep.cli.run import runs_option

if TYPE_CHECKING:
    from lockstep.export.facts import Chosen

FOLDERS = ("mlflow", "tensorboard", "hta")
# The timeline of one run (docs/timeline.md).
TIMELINES = ("perfetto", "hta")

EPILOG = """\b
Examples:
  lockstep export last -o run.csv                       one row, every setting and result
  lockstep export batch-size --what epochs -o curves.csv
  lockstep export last --what steps -o steps.parquet    every step of every rank
  lockstep export batch-size --format mlflow -o tracked       then: mlflow ui --backend-store-uri …
  lockstep export batch-size --format tensorboard -o board    then: tensorboard --logdir board
  lockstep export last --format perfetto -o trace.json     the timeline of a run with --trace

\b
For its curves alone TensorBoard needs no export: tensorboard --logdir runs
"""


@click.command("export", epilog=EPILOG)
@click.argument("names", nargs=-1, required=True, metavar="RUN|STUDY...")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="The file to write; for mlflow, tensorboard and hta, the folder.",
)
@click.option(
    "--what", type=click.Choice(["runs", "epochs", "steps"]), default="runs", show_default=True, help="A row for each …"
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
    from lockstep.errors import InputError
    from lockstep.export import writers
    from lockstep.export.facts import Chosen
    from lockstep.export.tables import TABLES
    from lockstep.run import runs_root
    from lockstep.study.folder import StudyFolder
    from lockstep.study.gather import named, of_study

    chosen = form or output.suffix.removeprefix(".")
    if chosen not in writers.WRITERS and form not in (*FOLDERS, *TIMELINES):
        raise InputError(f"-o {output}: its ending says no format; add --format csv, json or parquet")
    if not output.absolute().parent.is_dir():
        raise InputError(f"-o {output}: there is no folder {output.absolute().parent}")
    if output.exists() and output.is_dir() != (form in FOLDERS):
        raise InputError(f"-o {output}: is {'a folder' if output.is_dir() else 'a file'} already; name another one")
    found: list[Chosen] = []
    for name in names:
        study = StudyFolder.find(name, runs) if name != "last" else None  # 'last' is the last run, as with show
        found += (
            [Chosen(one.run, study.name, cell.name) for cell in of_study(study, study.read()) for one in cell.samples]
            if study
            else [Chosen(run) for run in named([name], runs_root(runs))]
        )
    if form in TIMELINES:
        _write_timeline(form, found, output)
        return
    if form in FOLDERS:
        _write_folder(form, found, output)
        return
    rows = TABLES[what]([one.run for one in found])
    writers.WRITERS[chosen](rows, output)
    note(f"{len(rows)} rows in {output}")


def _write_timeline(form: str, found: list[Chosen], output: Path) -> None:
    from lockstep.errors import InputError
    from lockstep.export import perfetto

    given = click.get_current_context().get_parameter_source("what")
    if given is click.core.ParameterSource.COMMANDLINE:
        raise InputError(f"--what chooses the rows of a table: --format {form} has one run's timeline, leave it out")
    if len(found) != 1:
        raise InputError(f"--format {form}: a timeline is of one run, and these are {len(found)}; name one")
    try:
        note({"perfetto": perfetto.write, "hta": perfetto.write_for_hta}[form](found[0].run, output))
    except OSError as error:
        raise InputError(f"cannot write {output}: {error.strerror}") from None


def _write_folder(form: str, found: list[Chosen], output: Path) -> None:
    from lockstep.errors import InputError
    from lockstep.export import mlflow, tensorboard

    given = click.get_current_context().get_parameter_source("what")
    if given is click.core.ParameterSource.COMMANDLINE:
        raise InputError(f"--what chooses the rows of a table: --format {form} has runs and epochs, leave it out")
    try:
        note({"mlflow": mlflow.write, "tensorboard": tensorboard.write}[form](found, output))
    except OSError as error:
        raise InputError(f"cannot write {output}: {error.strerror}") from None
