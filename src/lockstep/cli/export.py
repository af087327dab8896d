"""`lockstep export`: runs as tables for other tools."""

from __future__ import annotations

from pathlib import Path

import click

from lockstep.cli.output import note
from lockstep.cli.run import runs_option

EPILOG = """\b
Examples:
  lockstep export last -o run.csv                       one row, every setting and result
  lockstep export batch-size --what epochs -o curves.csv
  lockstep export last --what steps -o steps.parquet    every step of every rank

\b
TensorBoard needs no export: tensorboard --logdir runs
"""


@click.command("export", epilog=EPILOG)
@click.argument("names", nargs=-1, required=True, metavar="RUN|STUDY...")
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path, dir_okay=False), help="The file to write."
)
@click.option(
    "--what", type=click.Choice(["runs", "epochs", "steps"]), default="runs", show_default=True, help="A row for each …"
)
@click.option(
    "--format", "form", type=click.Choice(["csv", "json", "parquet"]), help="By default, what the file's ending says."
)
@runs_option
def command(names: tuple[str, ...], output: Path, what: str, form: str | None, runs: Path | None) -> None:
    """Write runs, or those of a study, as a table that other tools open."""
    from lockstep.errors import InputError
    from lockstep.export import writers
    from lockstep.export.tables import TABLES
    from lockstep.run import runs_root
    from lockstep.study.folder import StudyFolder
    from lockstep.study.gather import named, of_study

    chosen = form or output.suffix.removeprefix(".")
    if chosen not in writers.WRITERS:
        raise InputError(f"-o {output}: its ending says no format; add --format csv, json or parquet")
    if not output.absolute().parent.is_dir():
        raise InputError(f"-o {output}: there is no folder {output.absolute().parent}")
    found = []
    for name in names:
        study = StudyFolder.find(name, runs) if name != "last" else None  # 'last' is the last run, as with show
        found += (
            [one.run for cell in of_study(study, study.read()) for one in cell.samples]
            if study
            else named([name], runs_root(runs))
        )
    rows = TABLES[what](found)
    writers.WRITERS[chosen](rows, output)
    note(f"{len(rows)} rows in {output}")
