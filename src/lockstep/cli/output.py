"""How commands print: one JSON document or text on stdout, everything else on stderr."""

from __future__ import annotations

import json
import os
import shlex
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


def next_step(text: str) -> None:
    """The last line of a command: what to type now."""
    if text:
        note("next: " + text.replace("; lockstep ", "\n      lockstep "))


def place(runs: Path | None) -> str:
    """Words for a command that is printed: where the runs are, if the user has said so."""
    return f" --runs {shlex.quote(str(runs))}" if runs and not os.environ.get("LOCKSTEP_RUNS") else ""


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
