"""The document drawn in a terminal: tables that fit the window, findings, small plots.

Everything that is printed passes through here, so this is the one place where text from outside (names, failure texts, compilers' words) is made
printable. A table that is too wide loses columns, the spare ones first, and says which: words, ids and numbers are never cut or broken.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from lockstep.text import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from lockstep.report.views import Part, Published, Said, Table

# Off a terminal there is no window to fit; a table that needs more than this is for --json.
WIDE = 160
GAP = 2
INDENT = 4
MOST_LINES = 3
UNITS = "%|×|[µm]?s|min|h|[kMG]?B|[KMG]iB"
STATES = {"done": "green", "failed": "red", "cancelled": "yellow", "stalled": "red", "damaged": "red"}
CLAIMS = {"agrees": "green", "no difference seen": "green", "differs": "red"}
Item: TypeAlias = "str | Text | tuple[list[str], str]"
"""A cell: a text, a text with a style, or lines and their style."""


def console() -> Console:
    """A console as wide as the window, or as COLUMNS says."""
    width = None if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit() else WIDE
    return _terminal()(width=width, markup=False, emoji=False, highlight=False, soft_wrap=False)


@cache
def _terminal() -> type[Console]:
    """Every text that is printed passes `render_str`. Markup is off: `[rank0]` is not a style. Use `styled` for styles."""
    from rich.console import Console

    class Terminal(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(printable(text), **options)

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would end the process, with exit code 1

    return Terminal


def note(text: str, whole: bool = False) -> None:
    """A remark for the person at the terminal, folded between its words but where it is `whole`; never mixes with a command's output."""
    import click

    with suppress(OSError):  # nobody looks on any more, and that ends nothing
        lines = printable(text).split("\n")
        if sys.stderr.isatty() and not whole:
            width = shutil.get_terminal_size().columns
            lines = [
                part for line in lines for part in ([line] if _width(line) <= width else _fold(_words(line), width))
            ]
        click.echo("\n".join(lines), err=True)


def styled(*parts: str | tuple[str, str]) -> Text:
    """A line of texts, some of them with a style: `styled(("done", "green"), " in 3 s")`."""
    from rich.text import Text

    return Text.assemble(
        *(printable(part) if isinstance(part, str) else (printable(part[0]), part[1]) for part in parts)
    )


# ---------------------------------------------------------------- tables


class Grid:
    """A table of texts, made to fit a width. Each cell is lines of text with a style: what it says, and notes below it."""

    def __init__(self, headers: Sequence[str], rows: Iterable[Sequence[Item]], right: Sequence[int]) -> None:
        self.headers = [printable(header) for header in headers]
        self.cells = [[_lines(cell) for cell in row] for row in rows]
        self.right = right

    def wide(self, column: int) -> int:
        """The width at which nothing is folded."""
        lines = [line for row in self.cells for line in row[column][0]]
        return max(map(_width, [self.headers[column], *lines]))

    def narrow(self, column: int, width: int) -> int:
        """The least width that breaks neither a word nor a number from its unit. A row's name is folded once at most, unless that takes more
        than half of the window's `width`."""
        lines = [line for row in self.cells for line in row[column][0]]
        words = [word for line in lines for word in self._pieces(line, column)]
        least = max(map(_width, [*self.headers[column].split(), *words, ""]))
        if column == 0:
            while least < width // 2 and any(len(self._folded(line, column, least)) > 2 for line in lines):
                least += 1
        return least

    def _pieces(self, line: str, column: int) -> list[str]:
        """Where a line may be folded: text between words, a number before its interval and after a comma."""
        return re.split(r" (?=\()|(?<=,) ", line) if column in self.right else line.split()

    def fit(self, width: int, spare: Sequence[int]) -> tuple[dict[int, int], list[int]]:
        """The width of each column that is shown, and the columns that are left out: what does not fit, and what would make a text a tower of words."""
        found = [self._fit(width, spare, count) for count in range(len(spare) + 1)]
        return min(found, key=lambda one: max(MOST_LINES, *(self._height(*column) for column in one[0].items())))

    def _height(self, column: int, width: int) -> int:
        """How many lines its longest text takes."""
        lines = [line for row in self.cells for line in row[column][0]] if column not in self.right else []
        return max((len(self._folded(line, column, width)) for line in lines), default=0)

    def _fit(self, width: int, spare: Sequence[int], without: int) -> tuple[dict[int, int], list[int]]:
        """`without`: how many of the spare columns are left out at once."""
        narrow = {
            column: self.narrow(column, width) for column in range(len(self.headers)) if column not in spare[:without]
        }
        order = [*spare[without:], *(c for c in reversed(range(1, len(self.headers))) if c not in spare)]
        left_out = list(spare[:without])
        while order and sum(narrow.values()) + GAP * (len(narrow) - 1) > width:
            left_out.append(order.pop(0))
            del narrow[left_out[-1]]
        room = width - sum(narrow.values()) - GAP * (len(narrow) - 1)
        # Those that need least get it first: as few as possible are folded.
        for column in sorted(narrow, key=lambda column: self.wide(column) - narrow[column]):
            more = max(0, min(room, self.wide(column) - narrow[column]))
            narrow[column] += more
            room -= more
        return narrow, sorted(left_out)

    def drawn(self, widths: dict[int, int]) -> Text:
        from rich.text import Text

        heads = [(_fold(self.headers[c].split(), widths[c]), "bold") for c in widths]
        height = max(len(lines) for lines, _ in heads)
        text = Text()
        self._put(text, [([""] * (height - len(lines)) + lines, style) for lines, style in heads], widths)
        text.append("  ".join("─" * width for width in widths.values()) + "\n", style="dim")
        for number, row in enumerate(self.cells):
            folded = []
            for column in widths:
                lines, style = row[column]
                folded.append(([part for line in lines for part in self._folded(line, column, widths[column])], style))
            if number and max(len(lines) for lines, _ in folded) > 2:
                text.append("\n")
            self._put(text, folded, widths)
        text.right_crop(1)
        return text

    def _folded(self, line: str, column: int, width: int) -> list[str]:
        return [line] if _width(line) <= width else _fold(self._pieces(line, column), width)

    def _put(self, text: Text, row: Sequence[tuple[list[str], str]], widths: dict[int, int]) -> None:
        for place in range(max(len(lines) for lines, _ in row)):
            for column, (lines, style) in zip(widths, row, strict=True):
                line = lines[place] if place < len(lines) else ""
                pad = " " * (widths[column] - _width(line))
                text.append(pad + line if column in self.right else line + pad, style=style)
                text.append(" " * GAP)
            text.right_crop(len(text.plain) - len(text.plain.rstrip(" ")))
            text.append("\n")


def _lines(cell: Item) -> tuple[list[str], str]:
    if isinstance(cell, str):
        return printable(cell).split("\n"), ""
    if isinstance(cell, tuple):
        return [part for line in cell[0] for part in printable(line).split("\n")], cell[1]
    return cell.plain.split("\n"), str(cell.spans[0].style if cell.spans else cell.style)


def _fold(pieces: Sequence[str], width: int) -> list[str]:
    found = [""]
    for piece in pieces:
        joined = f"{found[-1]} {piece}" if found[-1] else piece
        if found[-1] and _width(joined) > width:
            found.append(piece)
        else:
            found[-1] = joined
    return found


def _words(text: str) -> list[str]:
    """Where prose may be folded: between words, and not between a number and its unit."""
    return re.split(rf"\s+(?!(?:{UNITS})(?!\w))", text.strip())


def _width(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text)


def print_table(
    headers: Sequence[str],
    rows: Iterable[Sequence[Item]],
    right: Sequence[int] = (),
    spare: Sequence[int] = (),
    out: Console | None = None,
) -> None:
    """`right`: columns of numbers. `spare`: columns that a narrow window does without, the most spare first; then from the last on."""
    out = out or console()
    grid = Grid(headers, rows, right)
    widths, left_out = grid.fit(out.width, spare)
    out.print(grid.drawn(widths), soft_wrap=True)
    if left_out:
        names = ", ".join(grid.headers[column] for column in left_out)
        _paragraph(out, f"Left out at {out.width} columns: {names}.", "dim")


def print_records(
    rows: Sequence[Mapping[str, Item]],
    right: Sequence[int] = (),
    spare: Sequence[int] = (),
    out: Console | None = None,
) -> None:
    """Rows that name their own columns."""
    if rows:
        print_table(list(rows[0]), [list(row.values()) for row in rows], right, spare, out)


def draw_table(table: Table, out: Console) -> None:
    """A table of the document."""
    print_table(table.columns, _items(table), table.right, table.spare, out)
    if table.below:
        _paragraph(out, table.below, "dim")


def table_text(table: Table, out: Console) -> Text:
    """A table of the document as a text that fits, for whoever draws it again and again."""
    grid = Grid(table.columns, _items(table), table.right)
    text = grid.drawn(grid.fit(out.width, table.spare)[0])
    return text.append(f"\n{table.below}") if table.below else text


def _items(table: Table) -> list[list[Item]]:
    return [[([cell.text, *cell.notes], "dim" if cell.faint else "") for cell in row] for row in table.rows]


# ---------------------------------------------------------------- the document


def draw(part: Part, out: Console, plots: bool = False) -> None:
    """A run, some runs, a study or a race: the answers, facts, tables, notes and plots, in this order. What to type next is the caller's to say."""
    facts = dict(part.facts)
    state, cause = facts.pop("state", ""), facts.pop("cause", "")
    gap = " " * GAP
    if state:
        line = styled((part.name, "bold"), gap, (state, STATES.get(state, "cyan")), f": {cause}" if cause else "")
        out.print(line, soft_wrap=True)
    else:
        hanging(out, (part.name, "bold"), part.about)
    draw_answers(part.headlines, out)
    if part.headlines and facts:
        out.print()
    margin = max(map(len, facts), default=0)
    for label, value in facts.items():
        hanging(out, (label.ljust(margin), "dim"), value)
    for table in (part.table, *part.tables):
        if table:
            out.print()
            draw_table(table, out)
    if part.table and part.table.says:
        _paragraph(out, part.table.says, "dim")
    for note in part.notes:
        hanging(out, ("note", "yellow"), note)
    for source in part.published:
        _draw_published(source, out)
    if plots:
        _draw_plots(part, out)


def draw_answers(found: Sequence[Said], out: Console) -> None:
    """Sentences, each with its reason below it."""
    for said in found:
        trouble = said.question in ("failed", "left out")
        hanging(out, ("•", "red" if trouble else "cyan"), said.verdict, "bold", gap=1)
        if said.why:
            hanging(out, ("  why", "dim"), said.why)


def draw_findings(found: Sequence[Said], out: Console) -> None:
    for number, said in enumerate(found, start=1):
        share = f", {said.share()}" if said.share() else ""
        style = "red" if said.question in ("failed", "left out", "state") else "cyan"
        hanging(out, (f"{number}. {said.question}{share}", style), said.verdict, "bold")
        for label, text in said.lines():
            hanging(out, (f"   {label:<4}", "dim"), text)


def _draw_published(source: Published, out: Console) -> None:
    _paragraph(out, f"Published, {source.source}:")
    for claim in source.claims:
        figures = f" ({claim.figures})" if claim.figures else ""
        why = f"; {claim.why}" if claim.why else ""
        hanging(out, (f"  {claim.verdict}", CLAIMS.get(claim.verdict, "yellow")), f"{claim.text}{figures}{why}")


def _paragraph(out: Console, text: str, style: str = "") -> None:
    out.print(styled(("\n".join(_fold(_words(printable(text)), out.width)), style)), soft_wrap=True)


def hanging(out: Console, head: tuple[str, str], text: str, style: str = "", gap: int = GAP) -> None:
    """A word in front, and the text beside it, folded between its words: what is longer than a line (a path, a command) stays whole.

    Where the word in front takes more than half of the window, or a path or an id does not fit beside it, the text stands below.
    """
    margin = _width(head[0]) + gap
    words = [_words(line) for line in printable(text).split("\n")]
    longest = max(_width(word) for line in words for word in line)
    below = margin + _width(text) > out.width and (
        margin > out.width // 2 or margin + longest > out.width >= INDENT + longest
    )
    margin = INDENT if below else margin
    lines = [part for line in words for part in _fold(line, out.width - margin)]
    first = (head[0].rstrip(), head[1]) if below else head
    line = styled(first, f"\n{' ' * margin}" if below else " " * gap, (f"\n{' ' * margin}".join(lines), style))
    line.rstrip()
    out.print(line, soft_wrap=True)


def _draw_plots(part: Part, out: Console) -> None:
    """Curves beside each other where there is room, bars below each other."""
    from rich.columns import Columns

    from lockstep.report import characters
    from lockstep.report.views import Lines

    curves = [drawn for chart in part.charts if isinstance(chart, Lines) and (drawn := characters.curves(chart))]
    bars = characters.table_bars(part.table, out.width) if part.table else []
    bars += [
        drawn
        for chart in part.charts
        if not isinstance(chart, Lines) and (drawn := characters.figure(chart, out.width))
    ]
    if curves:
        out.print()
        out.print(Columns(curves, padding=(1, 4)))
    for text in bars:
        out.print()
        out.print(text, soft_wrap=True)
