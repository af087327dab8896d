"""`lockstep schema`: what an editor needs to complete and check recipe and study files."""

from __future__ import annotations

import json

import click

EPILOG = """\b
Examples:
  lockstep schema recipe > recipe.schema.json
  lockstep schema study > study.schema.json

Editors with a TOML language server (taplo: VS Code's "Even Better TOML", Neovim, Helix) complete and check keys in
a file whose first line is '#:schema ./recipe.schema.json'; recipes that Lockstep prints have it.
"""
NAMED = "#:schema ./recipe.schema.json"
"""The first line of a recipe that is printed: where its editor looks for the schema, once that is written beside it. Else it is a comment."""


@click.command("schema", epilog=EPILOG)
@click.argument("kind", type=click.Choice(["recipe", "study"]))
def command(kind: str) -> None:
    """Print the JSON Schema of recipe files or of study files."""
    from lockstep.study.schema import recipe_file, study_file

    click.echo(json.dumps(recipe_file() if kind == "recipe" else study_file(), indent=1))
