"""The report as Markdown or LaTeX, with its pictures and tables in a folder beside it."""

from __future__ import annotations

from pathlib import Path

from lockstep.files import write_atomically
from lockstep.report.latex import file_name, latex, table_text, tables_of
from lockstep.report.markdown import markdown
from lockstep.report.vega import files
from lockstep.report.views import Report


def write(report: Report, output: Path, form: str) -> int:
    """Write `output` and what it refers to; returns how many files stand beside it.

    They are linked by a relative path: the two can be moved together. The document itself comes last, so that it never lacks them.
    """
    folder = output.with_name(f"{file_name(output.stem)}-files")
    made: dict[str, bytes] = {}
    pictures = {}
    for chart in (chart for part in report.parts for chart in part.charts):
        name = file_name(chart.id)
        pictures[chart.id] = f"{folder.name}/{name}"
        made[f"{name}.svg" if form == "md" else f"{name}.pdf"] = (
            files.svg(chart).encode() if form == "md" else files.pdf(chart)
        )
    if form == "md":
        text = markdown(report, {id_: f"{path}.svg" for id_, path in pictures.items()})
    else:
        tables = {
            name: table
            for number, part in enumerate(report.parts, 1)
            for name, table in tables_of(part, number).items()
        }
        made |= {f"{file_name(name)}.tex": table_text(table, name).encode() for name, table in tables.items()}
        text = latex(report, pictures, {name: f"{folder.name}/{file_name(name)}" for name in tables})
    if made:
        folder.mkdir(exist_ok=True)
    for name, data in made.items():
        write_atomically(folder / name, data, durable=False)
    write_atomically(output, text.encode())
    return len(made)
