"""The report as LaTeX: tables with rules of booktabs and their intervals, and figures; each table also stands in a file of its own, for papers.

Every text from outside is escaped: a name is never a command. What a Latin text font does not have is written as its code point.
"""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence

from lockstep.report.views import AnyChart, Cell, Command, Part, Report, Said, Table
from lockstep.text import printable

# Longer texts of a cell are broken into lines, and tables with more rows into pages.
WIDEST_CELL = 48
MOST_ROWS = 40

HEAD = r"""\documentclass{article}
\usepackage[T1]{fontenc}
\usepackage[utf8]{inputenc}
\IfFileExists{lmodern.sty}{\usepackage{lmodern}}{}
\usepackage[margin=2.5cm]{geometry}
\usepackage{booktabs,color,graphicx,longtable}
"""

_SIGNS = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "`": r"\textasciigrave{}",
    # Behind the end of a row these would be its options.
    "[": "{[}",
    "]": "{]}",
    "*": "{*}",
    "\u00a0": "~",
    "–": "--",
    "—": "---",
    "−": "$-$",
    "×": r"$\times$",
    "·": r"$\cdot$",
    "±": r"$\pm$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "≈": r"$\approx$",
    "→": r"$\rightarrow$",
    "∞": r"$\infty$",
    "µ": r"$\mu$",
    "μ": r"$\mu$",
    "°": r"$^\circ$",
    "²": r"$^2$",
    "³": r"$^3$",
    "…": r"\dots{}",
    "‘": "`{}",
    "’": "'{}",
    "“": "``{}",
    "”": "''{}",
}
# Letters that the T1 encoding of LaTeX's text fonts has, beside ASCII.
_LETTERS = {chr(code) for code in range(0xC0, 0x100)} - set("×÷") | set(
    "ŒœŠšŽžŸŁłĄąĆćĘęŃńŚśŹźŻżČčĎďĚěŇňŘřŤťŮůŐőŰűĂăȘșȚțĞğİı"
)


# Two of these in a row would become one sign.
_LIGATURES = re.compile("([-,'])(?=\\1)")


def escaped(text: str) -> str:
    """A user's words as words: nothing in them is a command of TeX's."""
    # A zero, which printable text does not have, stands for the gap until the signs are replaced.
    parted = _LIGATURES.sub("\\1\0", " ".join(printable(text).split()))
    return "".join(map(_sign, parted)).replace("\0", "{}")


def _sign(sign: str) -> str:
    known = _SIGNS.get(sign)
    if known is not None:
        return known
    return sign if sign.isascii() or sign in _LETTERS else rf"\texttt{{{{[}}U+{ord(sign):04X}{{]}}}}"


def latex(report: Report, pictures: Mapping[str, str], tables: Mapping[str, str]) -> str:
    """The whole document. `pictures`, `tables`: the files of plots (by id) and of tables (by the key of `tables_of`), without their endings."""
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(report.written))
    body = [line for number, part in enumerate(report.parts, 1) for line in _part(part, number, pictures, tables)]
    return "\n".join(
        [
            f"{HEAD}\\title{{{escaped(report.title)}}}",
            rf"\author{{Lockstep {escaped(report.lockstep)}}}",
            rf"\date{{{escaped(when)}}}",
            r"\begin{document}",
            r"\maketitle",
            *body,
            r"\end{document}",
            "",
        ]
    )


def tables_of(part: Part, number: int) -> dict[str, Table]:
    """The tables of the Nth part that have rows, each by a name of its own."""
    found = (part.table, *part.tables, part.settings, part.same, part.environment)
    return {f"{number}-{table.id}": table for table in found if table and table.rows}


def _part(part: Part, number: int, pictures: Mapping[str, str], tables: Mapping[str, str]) -> Iterable[str]:
    yield rf"\section{{{escaped(part.name)}}}"
    if part.about:
        yield escaped(part.about)
    yield from _list(rf"\textbf{{{escaped(label)}}}: {escaped(value)}" for label, value in part.facts)
    findings = [*part.headlines, *(said for about in part.findings for said in about.findings)]
    if findings:
        yield r"\subsection*{Findings}"
        yield from _list(map(_said, part.headlines))
        for about in part.findings:
            yield rf"\paragraph{{{escaped(about.name)}}}"
            yield from _list(map(_said, about.findings))
    if part.notes:
        yield r"\subsection*{What to know before comparing}"
        yield from _list(map(escaped, part.notes))
    for source in part.published:
        yield rf"\subsection*{{Published, {escaped(source.source)}}}"
        yield from _list(
            rf"\textbf{{{escaped(claim.verdict)}}}: {escaped('; '.join(filter(None, (claim.text, claim.figures, claim.why))))}"
            for claim in source.claims
        )
    yield from (rf"\input{{{tables[name]}}}" for name in tables_of(part, number))
    yield from (_figure(chart, pictures[chart.id]) for chart in part.charts)
    if part.commands:
        yield r"\subsection*{Commands}"
        yield from map(_command, part.commands)
    yield r"\clearpage"


def _list(items: Iterable[str]) -> Iterable[str]:
    """Nothing where there are no items: an empty list is an error of LaTeX's."""
    found = [rf"\item {item}" for item in items]
    return [r"\begin{itemize}", *found, r"\end{itemize}"] if found else []


def _said(said: Said) -> str:
    more = [f"{label}: {escaped(text)}" for label, text in said.lines()]
    share = f" ({escaped(said.share())})" if said.share() else ""
    return r" \\ ".join([rf"\textbf{{{escaped(said.verdict)}}}{share}", *more])


def _command(command: Command) -> str:
    lines = r" \\ ".join(escaped(line) for line in command.lines if line.strip())
    return rf"{escaped(command.name)}: \begin{{flushleft}}\small\ttfamily {lines} \end{{flushleft}}"


def _figure(chart: AnyChart, file: str) -> str:
    caption = escaped(f"{chart.title}. {chart.says}")
    return "\n".join(
        [
            r"\begin{figure}[htbp]",
            r"\centering",
            rf"\includegraphics[width=\linewidth,height=0.8\textheight,keepaspectratio]{{{file}}}",
            rf"\caption{{{caption}}}",
            rf"\label{{fig:{chart.id}}}",
            r"\end{figure}",
        ]
    )


def table_text(table: Table, label: str) -> str:
    """A table as a file to \\input. It needs the packages booktabs, color, graphicx and longtable."""
    columns = "".join("r" if place in table.right else "l" for place in range(len(table.columns)))
    said = f"{table.title}. {table.says}" + (f" {table.below}" if table.below else "")
    caption = rf"\caption{{{escaped(said)}}}\label{{tab:{label}}}"
    head = _row([escaped(name) for name in table.columns])
    rows = [_row([_cell(cell, place in table.right) for place, cell in enumerate(row)]) for row in table.rows]
    note = "% A table of Lockstep's report: \\usepackage[T1]{fontenc} and \\usepackage{booktabs,color,graphicx,longtable}, then \\input this file."
    if len(rows) > MOST_ROWS:
        lines = [
            rf"{{\footnotesize\begin{{longtable}}{{{columns}}}",
            rf"{caption}\\",
            rf"\toprule {head} \midrule\endhead",
            r"\bottomrule\endfoot",
            *rows,
            r"\end{longtable}}",
        ]
    else:
        lines = [
            r"\begin{table}[htbp]\centering",
            caption,
            r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
            rf"\begin{{tabular}}{{{columns}}}",
            rf"\toprule {head} \midrule",
            *rows,
            r"\bottomrule\end{tabular}}",
            r"\end{table}",
        ]
    return "\n".join([note, *lines, ""])


def _row(cells: Sequence[str]) -> str:
    return rf"{' & '.join(cells)} \\"


def _cell(cell: Cell, right: bool) -> str:
    """Its text, and the lines below it: the difference with its interval, and the verdict."""
    lines = [line for text in (cell.text, *cell.notes) for line in textwrap.wrap(printable(text), WIDEST_CELL) or [""]]
    written = [escaped(line) for line in lines]
    if cell.faint:
        written = [rf"\textcolor[gray]{{0.45}}{{{line}}}" for line in written]
    if len(written) == 1:
        return written[0]
    side, below = "r" if right else "l", r" \\ ".join(written)
    return rf"\begin{{tabular}}[t]{{@{{}}{side}@{{}}}}{below}\end{{tabular}}"


def file_name(text: str) -> str:
    """A name that is the same in a path, in a link and in TeX."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-") or "report"
