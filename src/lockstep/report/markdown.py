"""The report as Markdown: findings, tables and plots, for papers, issues and mail."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from lockstep.report.views import AnyChart, Cell, Part, Report, Said, Table


def markdown(report: Report, pictures: Mapping[str, str] | None = None) -> str:
    """`pictures`: the file of each plot, by its id; those without one are left out."""
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(report.written))
    lines = [f"# {plain(report.title)}", "", f"Written {when} by Lockstep {report.lockstep}."]
    for part in report.parts:
        lines += [""] if len(report.parts) == 1 else ["", f"# {plain(part.name)}", ""]
        lines += _part(part, pictures or {})
    return "\n".join(lines).rstrip() + "\n"


def _part(part: Part, pictures: Mapping[str, str]) -> Iterable[str]:
    if part.about:
        yield from (plain(part.about), "")
    if part.headlines:
        yield from (*(line for said in part.headlines for line in _said(said)), "")
    yield from (f"- **{plain(label)}**: {plain(value)}" for label, value in part.facts)
    if part.findings:
        yield from ("", "## Findings", "")
    for about in part.findings:
        if len(part.findings) > 1 or part.kind != "run":
            yield from ("", f"### {plain(about.name)}", "")
        yield from (line for said in about.findings for line in _said(said))
    if part.notes:
        yield from (
            "",
            "What to know:" if part.kind == "run" else "What to know before comparing:",
            "",
            *(f"- {plain(note)}" for note in part.notes),
        )
    if part.table:
        yield from ("", f"## {part.table.title}", "", plain(part.table.says), "", *table_lines(part.table))
    for source in part.published:
        if source.claims:
            yield from ("", f"Published, {plain(source.source)}:", "")
        for claim in source.claims:
            why = f"; {plain(claim.why)}" if claim.why else ""
            yield f"- **{claim.verdict}**: {plain(claim.text)}" + (
                f" ({plain(claim.figures)}){why}" if claim.figures else why
            )
    yield from _plots([chart for chart in part.charts if chart.id in pictures], pictures)
    for table in (*part.tables, part.settings, part.same, part.environment):
        if table and table.rows:
            yield from ("", f"## {table.title}", "", *table_lines(table))
    yield from ("", "## Commands", "")
    for command in part.commands:
        yield from (f"{plain(command.name)}:", "", *(f"    {line}" for line in command.lines), "")


def _plots(charts: Sequence[AnyChart], pictures: Mapping[str, str]) -> Iterable[str]:
    for section, those in groupby(charts, lambda chart: chart.section):
        yield from ("", f"## {plain(section)}")
        for chart in those:
            yield from (
                "",
                f"![{plain(chart.title)}]({pictures[chart.id]})",
                "",
                f"**{plain(chart.title)}**. {plain(chart.says)}",
            )


def _said(said: Said) -> Iterable[str]:
    share = f" ({said.share()})" if said.share() else ""
    yield f"- **{plain(said.verdict)}**{share}"
    yield from (f"  - {label}: {plain(text)}" for label, text in said.lines())


def table_lines(table: Table) -> list[str]:
    ruler = ["---:" if place in table.right else "---" for place in range(len(table.columns))]
    rows = [[_cell(cell) for cell in row] for row in table.rows]
    below = ["", plain(table.below)] if table.below else []
    return [_row([plain(name) for name in table.columns]), _row(ruler), *(_row(row) for row in rows), *below]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(cell: Cell) -> str:
    return plain("; ".join([cell.text, *cell.notes]))


def plain(text: str) -> str:
    """A user's words as words: nothing in them becomes a mark, a table's edge or HTML."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", " ".join(text.split()))
