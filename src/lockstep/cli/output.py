"""How commands print: one JSON document or text on stdout, everything else on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")


def print_json(document: Any) -> None:
    """One document on stdout, nothing else."""
    click.echo(json.dumps(document, indent=2, default=str))


def note(text: str) -> None:
    """A remark for the person at the terminal; never mixes with a command's output."""
    click.echo(text, err=True)


def console(stderr: bool = False) -> Console:
    """A rich console; off a terminal it is wide enough never to cut a table."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else 160
    return Console(stderr=stderr, width=width, highlight=False, soft_wrap=False)


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> Table:
    """A plain table; `right` names the columns (by position) that hold numbers."""
    from rich import box
    from rich.table import Table

    result = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for position, header in enumerate(headers):
        result.add_column(header, justify="right" if position in right else "left", overflow="fold")
    for row in rows:
        result.add_row(*row)
    return result


def print_table(headers: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> None:
    console().print(table(headers, rows, right))
