"""`lockstep recipes`: the published recipes."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import msgspec

from lockstep.cli.options import json_option
from lockstep.cli.output import next_step, note, print_json, print_table
from lockstep.cli.schema import named, write_own
from lockstep.errors import InputError
from lockstep.recipes import REPORTS, Published, find, published

EPILOG = """\b
Examples:
  lockstep recipes
  lockstep recipes published/d-mnist
  lockstep run published/d-mnist epochs=1
  lockstep recipes published/d-mnist -o mine.toml
      a file of your own, whose keys your editor completes
"""


def complete_name(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Shell completion of recipes."""
    return [recipe.name for recipe in published() if recipe.name.startswith(incomplete)]


@click.command("recipes", epilog=EPILOG)
@click.argument("name", required=False, shell_complete=complete_name)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Write it to this file, and its JSON Schema beside it, for editors.",
)
@json_option
def command(name: str | None, output: Path | None, as_json: bool) -> None:
    """List the published recipes, print one of them, or make it a file of your own."""
    if output is not None and name is None:
        raise InputError("-o: says where to write a recipe: name one, for example published/d-mnist")
    if name is not None:
        recipe = find(name)
        if output is not None:
            write_own(output, "recipe", recipe.text())
        if as_json:
            print_json(_document(recipe))
        elif output is not None:
            next_step(f"lockstep run {shlex.quote(str(output))} --dry-run (what it comes to here)")
        else:
            click.echo(named("recipe", recipe.text()), nl=False)
            next_step(f"lockstep run {recipe.name} --dry-run (what it comes to here)")
        return
    found = published()
    if as_json:
        print_json([{**asdict(recipe), "path": str(recipe.path)} for recipe in found])
        return
    print_table(["recipe", "document", "what"], [[recipe.name, recipe.document, recipe.about] for recipe in found])
    note(f"{REPORTS}.")
    next_step(
        f"lockstep recipes {found[0].name} (what its report states and measured); lockstep run published/d-mnist epochs=1 (runs one)"
    )


def _document(recipe: Published) -> dict[str, Any]:
    """The file, and what it comes to with all defaults."""
    from lockstep.settings import load

    settings, placement = load([recipe.path], [])
    return {
        **asdict(recipe),
        "path": str(recipe.path),
        "text": recipe.text(),
        "recipe": msgspec.to_builtins(settings),
        "placement": msgspec.to_builtins(placement),
    }
