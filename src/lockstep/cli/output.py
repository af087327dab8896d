"""How commands print: one JSON document or text on stdout, everything else on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

import click

from lockstep.text import finite, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")


def print_json(document: Any) -> None:
    """One document on stdout, nothing else."""
    click.echo(json.dumps(finite(document), indent=2, default=str, allow_nan=False))


def note(text: str) -> None:
    """A remark for the person at the terminal; never mixes with a command's output."""
    with suppress(OSError):  # nobody looks on any more, and that ends nothing
        click.echo(printable(text), err=True)


def console(stderr: bool = False) -> Console:
    """A rich console; off a terminal it is wide enough never to cut a table."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else 160
    made: Console = _terminal()(stderr=stderr, width=width, markup=False, emoji=False, highlight=False, soft_wrap=False)
    return made


@cache
def _terminal() -> type[Console]:
    """Every text that is printed passes `render_str`, cells of tables too: the one place where it is made printable.

    Markup is off: texts come from users, compilers and other libraries, and `[rank0]` is not a style. Use `styled` for styles.
    """
    from rich.console import Console

    class Terminal(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(printable(text), **options)

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would end the process, with exit code 1

    return Terminal


def styled(*parts: str | tuple[str, str]) -> Text:
    """A line of texts, some of them with a style: `styled(("done", "green"), " in 3 s")`."""
    from rich.text import Text

    return Text.assemble(
        *(printable(part) if isinstance(part, str) else (printable(part[0]), part[1]) for part in parts)
    )


def table(headers: Sequence[str], rows: Iterable[Sequence[str | Text]], right: Sequence[int] = ()) -> Table:
    """A plain table; `right` names the columns (by position) that hold numbers."""
    from rich import box
    from rich.table import Table

    result = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for position, header in enumerate(headers):
        result.add_column(printable(header), justify="right" if position in right else "left", overflow="fold")
    for row in rows:
        result.add_row(*row)
    return result


def print_table(headers: Sequence[str], rows: Iterable[Sequence[str | Text]], right: Sequence[int] = ()) -> None:
    console().print(table(headers, rows, right))
