"""`lockstep report`: runs and studies as one page to look at, or as text, tables and pictures for papers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from lockstep.cli.options import runs_option
from lockstep.cli.output import check_output, console, next_step, note, writing
from lockstep.errors import InputError
from lockstep.units import counted

if TYPE_CHECKING:
    from lockstep.report.views import Report

FILES = ("html", "md", "json")
FOLDERS = ("csv", "svg", "png")

EPILOG = """\b
Examples:
  lockstep report last                              report.html of the newest run
  lockstep report batch-size -o batch-size.html     a study
  lockstep report runs/2026* -o compared.html       runs beside each other
  lockstep report runs/races/mine                   a race
  lockstep report batch-size -o tables.md           findings and tables as Markdown
  lockstep report batch-size --format svg -o plots  every plot as a file (also png, csv)

\b
The page needs no network and no server. docs/report.md says how to read it.
"""


@click.command("report", epilog=EPILOG)
@click.argument("names", nargs=-1, required=True, metavar="RUN|STUDY|RACE...")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("report.html"),
    help="The file to write; for csv, svg and png, the folder.",
)
@click.option(
    "--format", "form", type=click.Choice([*FILES, *FOLDERS]), help="By default, what the file's ending says."
)
@runs_option
def command(names: tuple[str, ...], output: Path, form: str | None, runs: Path | None) -> None:
    """Make one page of runs or studies: findings, curves, where the time went, comparison, how to do it again."""
    from lockstep.report.document import of_parts, part
    from lockstep.report.race import race_part
    from lockstep.report.subject import of_names
    from lockstep.report.terminal import draw_answers
    from lockstep.turns.folder import RaceFolder

    given = click.get_current_context().get_parameter_source("output") is click.core.ParameterSource.COMMANDLINE
    chosen = form or {"htm": "html", "markdown": "md"}.get(ending := output.suffix.removeprefix("."), ending)
    if not given and form and form != "html":
        raise InputError(f"--format {form} needs -o: {'a folder' if form in FOLDERS else 'a file'} to write")
    if chosen not in (*FILES, *FOLDERS) or (not form and chosen in FOLDERS):
        raise InputError(f"-o {output}: its ending says no format; name it .html, .md or .json, or add --format")
    check_output(output, chosen in FOLDERS)
    races = {name: race for name in names if name != "last" and (race := RaceFolder.find(name, runs))}
    others = tuple(name for name in names if name not in races)
    parts = [race_part(race.read(), race.windows(), race.path.name) for race in races.values()]
    document = of_parts(parts + [part(subject) for subject in (of_names(others, runs) if others else [])])
    with writing(output):
        note((_write_folder if chosen in FOLDERS else _write_file)(document, output, chosen))
    for each in document.parts:
        draw_answers(each.headlines, console())
    if chosen == "html":
        next_step(f"open {output} in a browser: it needs no network")


def _write_file(document: Report, output: Path, form: str) -> str:

    from lockstep.files import write_atomically
    from lockstep.report.html import page
    from lockstep.report.markdown import markdown

    makers: dict[str, Callable[[Report], str]] = {
        "html": page,
        "md": markdown,
        "json": lambda found: msgspec.json.format(msgspec.json.encode(found), indent=1).decode() + "\n",
    }
    data = makers[form](document).encode()
    # Whole or not at all: a page that is open may be reloaded at any moment.
    write_atomically(output, data)
    return f"{output}: {len(data) / 1e3:,.0f} kB"


def _write_folder(document: Report, output: Path, form: str) -> str:
    from lockstep.report import tables
    from lockstep.report.vega import files

    output.mkdir(exist_ok=True)
    count = 0
    for part in document.parts:
        for chart in part.charts:
            path = output / f"{chart.id}.{form}"
            if form == "png":
                files.png(chart, path)
            else:
                text = files.svg(chart) if form == "svg" else tables.csv_text(tables.data(chart))
                path.write_text(text, encoding="utf-8", newline="")
            count += 1
    if form == "csv":
        count += _write_tables(document, output)
    return f"{counted(count, 'file')} in {output}"


def _write_tables(document: Report, output: Path) -> int:
    from lockstep.report import tables

    several = len(document.parts) > 1
    found = {
        f"{number}-{table.id}" if several else table.id: table
        for number, part in enumerate(document.parts, 1)
        for table in (part.table, *part.tables, part.settings, part.same, part.environment)
        if table
    }
    for name, table in found.items():
        (output / f"{name}.csv").write_text(tables.csv_text(tables.cells(table)), encoding="utf-8", newline="")
    return len(found)
