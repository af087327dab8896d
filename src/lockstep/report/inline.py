"""A part of the document within another page: HTML without scripts and styles of its own, for a notebook's cell; and its answer as text.

Plots are static pictures. Jupyter, GitHub and mail drop scripts, style sheets and drawings that stand in the HTML itself, but show an image
whose source is data. What a reader cannot see (a picture that was dropped, a screen reader) is said in its text.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from lockstep.report.terminal import console, table_text
from lockstep.report.vega.files import svg
from lockstep.report.views import AnyChart, Part, Published, Said, Table
from lockstep.text import printable

# A cell is a glance: what is beyond this is in the report.
MOST_CHARTS = 3
SCROLLS = 'style="overflow-x: auto"'
FITS = 'style="max-width: 100%; height: auto"'


def html(part: Part) -> str:
    """The answer first, then its figures, plots and tables."""
    return "\n".join(["<div>", *_pieces(part), "</div>"])


def _pieces(part: Part) -> Iterator[str]:
    facts = dict(part.facts)
    state, cause = facts.pop("state", ""), facts.pop("cause", "")
    said = f"{state}: {cause}" if cause else state or part.about
    yield f"<p><b>{_text(part.name)}</b> {_text(said)}</p>"
    yield from _findings(part.headlines)
    for about in part.findings:
        if len(part.findings) > 1:
            yield f"<p><b>{_text(about.name)}</b></p>"
        yield from _findings(about.findings)
    if facts:
        yield _rows(
            [f'<th align="left">{_text(label)}</th>', f'<td align="left">{_text(value)}</td>']
            for label, value in facts.items()
        )
    if part.table:
        yield _table(part.table)
    yield from (_picture(chart) for chart in part.charts[:MOST_CHARTS])
    for source in part.published:
        yield from _published(source)
    for table in part.tables:
        yield f"<details><summary>{_text(table.title)}</summary>{_table(table)}</details>"
    if part.notes:
        yield _list(part.notes)


def _findings(found: Sequence[Said]) -> Iterator[str]:
    if found:
        yield f"<ol>{''.join(_said(said) for said in found)}</ol>" if len(found) > 1 else f"<p>{_inner(found[0])}</p>"


def _said(said: Said) -> str:
    return f"<li>{_inner(said)}</li>"


def _inner(said: Said) -> str:
    share = f" ({said.share()})" if said.share() else ""
    lines = [f"<b>{_text(said.verdict)}</b>{share}"]
    lines += [f"{label}: {_text(text)}" for label, text in said.lines()]
    return "<br>".join(lines)


def _published(source: Published) -> Iterator[str]:
    if source.claims:
        yield f"<p>Published, {_text(source.source)}:</p>"
        yield _list(
            f"{claim.verdict}: {claim.text}" + "".join(f" ({more})" for more in (claim.figures, claim.why) if more)
            for claim in source.claims
        )


def _list(texts: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{_text(text)}</li>' for text in texts)}</ul>"


def _table(table: Table) -> str:
    heads = [f"<th{_align(table, place)}>{_text(name)}</th>" for place, name in enumerate(table.columns)]
    body = []
    for row in table.rows:
        cells = ["<br>".join(_text(line) for line in (cell.text, *cell.notes)) for cell in row]
        body.append([f"<td{_align(table, place)}>{cell}</td>" for place, cell in enumerate(cells)])
    return _rows([heads, *body]) + (f"<p>{_text(table.below)}</p>" if table.below else "")


def _align(table: Table, place: int) -> str:
    """Numbers are not broken: a table that is too wide for its page scrolls."""
    return ' align="right" nowrap' if place in table.right else ' align="left"'


def _rows(rows: Iterable[Sequence[str]]) -> str:
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f"<div {SCROLLS}><table>{body}</table></div>"


def _picture(chart: AnyChart) -> str:
    data = base64.b64encode(svg(chart).encode()).decode()
    said = _text(f"{chart.title}. {chart.says}")
    return f'<p><img {FITS} alt="{said}" src="data:image/svg+xml;base64,{data}"></p>'


def _text(text: str) -> str:
    return escape(printable(text))


def plain(part: Part, figures: Sequence[str] = ()) -> str:
    """The answer in a few lines: how it ended, what was found, and the figures with their intervals. `figures`: which facts are part of it."""
    facts = dict(part.facts)
    state, cause = facts.pop("state", ""), facts.pop("cause", "")
    shown = ", ".join(f"{label} {facts[label]}" for label in figures if label in facts)
    head = "; ".join(text for text in (f"{state}: {cause}" if cause else state or part.about, shown) if text)
    lines = [f"{part.name}  {head}".rstrip()]
    for said in part.headlines if part.kind != "run" else []:  # of a run the figures say it, in one line
        lines += [said.verdict, *(f"{label}: {text}" for label, text in said.lines())]
    for about in part.findings:
        lines += [f"{about.name}:"] if len(part.findings) > 1 else []
        lines += [f"{number}. {said.verdict}" for number, said in enumerate(about.findings, 1)]
    if part.table and part.kind in ("race", "runs", "study"):
        lines += ["", table_text(part.table, console()).plain]
    return printable("\n".join(lines))
