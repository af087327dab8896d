"""`lockstep schema`: what an editor needs to complete and check recipe and study files; and files of one's own that name it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Literal

import click

from lockstep.cli.output import check_output, writing
from lockstep.errors import InputError
from lockstep.files import write_atomically

EPILOG = """\b
Examples:
  lockstep schema recipe > recipe.schema.json
  lockstep schema study > study.schema.json

Editors with a TOML language server (taplo: VS Code's "Even Better TOML", Neovim, Helix) complete and check keys in
a file whose first line is '#:schema ./recipe.schema.json'. Recipes that Lockstep prints have it; 'lockstep recipes
NAME -o FILE' and 'lockstep study copy NAME -o FILE' write the schema beside the file.
"""
Kind = Literal["recipe", "study"]
NAMED: dict[Kind, str] = {"recipe": "#:schema ./recipe.schema.json", "study": "#:schema ./study.schema.json"}
"""The first line of a file: where an editor looks for the schema. Where there is none, it is a comment."""


@click.command("schema", epilog=EPILOG)
@click.argument("kind", type=click.Choice(["recipe", "study"]))
def command(kind: Kind) -> None:
    """Print the JSON Schema of recipe files or of study files."""
    click.echo(_schema(kind))


def named(kind: Kind, text: str) -> str:
    """The file's text, with the line that names its schema."""
    return f"{NAMED[kind]}\n{text}"


def write_own(file: Path, kind: Kind, text: str) -> None:
    """A recipe or study as a file of the user's own, and its schema beside it. Nothing of the user's is overwritten."""
    check_output(file, folder=False)
    if os.path.lexists(file):
        raise InputError(f"-o {file}: is there already; name another one")
    with writing(file):
        write_atomically(file.absolute().parent / f"{kind}.schema.json", _schema(kind).encode() + b"\n")
        write_atomically(file, named(kind, text).encode())


def _schema(kind: Kind) -> str:
    from lockstep.study.schema import recipe_file, study_file

    return json.dumps(recipe_file() if kind == "recipe" else study_file(), indent=1)
