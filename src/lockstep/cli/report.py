"""`lockstep report`: runs and studies as one page to look at, or as text, tables and pictures for papers."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from lockstep.cli.options import complete_run, runs_option
from lockstep.cli.output import check_output, console, next_step, note, writing
from lockstep.cli.output import place as where_of
from lockstep.errors import InputError
from lockstep.reading import is_dir
from lockstep.units import counted

if TYPE_CHECKING:
    from lockstep.report.views import Report

FILES = ("html", "md", "tex", "json")
# Those with pictures and tables in a folder beside them.
PAPERS = ("md", "tex")
FOLDERS = ("csv", "svg", "png")

EPILOG = """\b
Examples:
  lockstep report last                              report.html of the newest run
  lockstep report batch-size -o batch-size.html     a study
  lockstep report runs/2026* -o compared.html       runs beside each other
  lockstep report runs/races/mine                   a race
  lockstep report batch-size -o paper.md            as Markdown; its plots are beside it, in paper-files
  lockstep report batch-size --format tex -o paper/  as LaTeX: report.tex, and tables and figures to \\input
  lockstep report batch-size --format svg -o plots  every plot as a file (also png, csv)

The page needs no network and no server. docs/report.md says how to read it.
"""


@click.command("report", epilog=EPILOG)
@click.argument("names", nargs=-1, required=True, metavar="RUN|STUDY|RACE...", shell_complete=complete_run)
@click.option(
    "-o",
    "--output",
    type=click.Path(),
    default="report.html",
    help="The file to write (with md and tex also a folder for it); for csv, svg and png, the folder.",
)
@click.option(
    "--format", "form", type=click.Choice([*FILES, *FOLDERS]), help="By default, what the file's ending says."
)
@runs_option
def command(names: tuple[str, ...], output: str, form: str | None, runs: Path | None) -> None:
    """Make one page of runs or studies: findings, curves, where the time went, comparison, how to do it again."""
    from lockstep.report.document import of_parts, part
    from lockstep.report.race import race_part
    from lockstep.report.subject import of_names
    from lockstep.report.terminal import draw_answers
    from lockstep.turns.folder import RaceFolder

    given = click.get_current_context().get_parameter_source("output") is click.core.ParameterSource.COMMANDLINE
    place = Path(output)
    chosen = form or {"htm": "html", "markdown": "md"}.get(ending := place.suffix.removeprefix("."), ending)
    if not given and form and form != "html":
        raise InputError(f"--format {form} needs -o: {'a folder' if form in FOLDERS else 'a file'} to write")
    if chosen not in (*FILES, *FOLDERS) or (not form and chosen in FOLDERS):
        raise InputError(f"-o {output}: its ending says no format; name it .html, .md, .tex or .json, or add --format")
    in_folder = chosen in PAPERS and (output.endswith("/") or is_dir(place))
    check_output(place, in_folder or chosen in FOLDERS)
    races = {name: race for name in names if name != "last" and (race := RaceFolder.find(name, runs))}
    others = tuple(name for name in names if name not in races)
    parts = [race_part(race.read(), race.windows(), race.path.name) for race in races.values()]
    document = of_parts(parts + [part(subject) for subject in (of_names(others, runs) if others else [])])
    with writing(place):
        if in_folder:
            place.mkdir(exist_ok=True)
            place /= f"report.{chosen}"
        note((_write_folder if chosen in FOLDERS else _write_file)(document, place, chosen))
    for each in document.parts:
        draw_answers(each.headlines, console())
    if chosen == "html":
        next_step(f"open {place} in a browser: it needs no network")
    else:
        next_step(f"lockstep report {shlex.join(names)}{where_of(runs)} (the same as a page)")


def _write_file(document: Report, output: Path, form: str) -> str:
    from lockstep.files import write_atomically
    from lockstep.report import paper
    from lockstep.report.html import page

    if form in PAPERS:
        beside = paper.write(document, output, form)
        return f"{output}, with {counted(beside, 'file')} beside it"
    text = (
        page(document)
        if form == "html"
        else msgspec.json.format(msgspec.json.encode(document), indent=1).decode() + "\n"
    )
    data = text.encode()
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
