"""How commands print: one JSON document or text on stdout, everything else on stderr."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from lockstep.errors import InputError
from lockstep.report.terminal import console, note, print_records, print_table, styled
from lockstep.text import finite

__all__ = [
    "check_output",
    "console",
    "next_step",
    "note",
    "place",
    "print_json",
    "print_records",
    "print_table",
    "styled",
    "writing",
]


def next_step(text: str, words: bool = False) -> None:
    """The last words of a command: what to type now, each command on a line of its own, to be copied whole; what it is for beside or below it.

    `words`: advice and no command, which is folded as any other text.
    """
    head = "next: "
    if words:
        note(head + text)
        return
    for part in re.split("; (?=lockstep )", text) if text else []:
        command, _, what = part.removesuffix(")").partition(" (") if part.endswith(")") else (part, "", "")
        below = sys.stderr.isatty() and len(head) + len(part) > shutil.get_terminal_size().columns
        note(head + command + (f"\n        ({what})" if what and below else f" ({what})" if what else ""), whole=True)
        head = " " * len(head)


def place(runs: Path | None, data_root: str | None = None) -> str:
    """Words for a command that is printed: where the runs and the data are, if the user has said so."""
    found = f" --runs {shlex.quote(str(runs))}" if runs else ""
    return f"{found} --data-root {shlex.quote(data_root)}" if data_root else found


def check_output(output: Path, folder: bool) -> None:
    """What `-o` names can be written, said before any work: a file or a folder, new or there already, in a folder that is there."""
    # A name that nothing can have is neither file nor folder; the methods of Path raise.
    is_dir, exists = os.path.isdir, os.path.lexists
    if not is_dir(output.absolute().parent):
        raise InputError(f"-o {output}: there is no folder {output.absolute().parent}")
    if exists(output) and is_dir(output) != folder:
        raise InputError(f"-o {output}: is {'a folder' if is_dir(output) else 'a file'} already; name another one")


@contextmanager
def writing(output: Path) -> Iterator[None]:
    """A disk that does not take the output is an error of one line."""
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write {output}: {error.strerror or error}") from None


def print_json(document: Any) -> None:
    """One document on stdout, nothing else."""
    click.echo(json.dumps(finite(document), indent=2, default=str, allow_nan=False))
