"""Options and arguments that several commands take, and the types of their numbers."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import click

from lockstep import words
from lockstep.units import MOST
from lockstep.words import Quantity
from lockstep.words import read_words as read_words

# Longer than any sentence.
WHOLE = 1000


class Group(click.Group):
    """Says of each command its whole sentence, which click cuts."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, each.get_short_help_str(WHOLE)) for name, each in sorted(self.commands.items())])


MOST_FLOAT = 1e9


def whole(least: int = 1, most: int = MOST) -> click.IntRange:
    return click.IntRange(least, most)


class Finite(click.FloatRange):
    """click takes NaN for a number within every range, and infinity for one without an upper end."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return found


def real(least: float, most: float = MOST_FLOAT, open_: bool = False) -> Finite:
    return Finite(least, most, min_open=open_)


class QuantityType(click.ParamType[float]):
    """A number with a unit that may be left out."""

    def __init__(self, quantity: Quantity) -> None:
        self.name, self._quantity = quantity.name, quantity

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return self._quantity.read(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


SECONDS = QuantityType(words.SECONDS)
SHARE = QuantityType(words.SHARE)

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
plot_option = click.option(
    "--plot/--no-plot",
    default=None,
    callback=lambda ctx, param, plot: sys.stdout.isatty() if plot is None else plot,
    help="Draw curves and bars too. By default, on a terminal.",
)
runs_option = click.option(
    "--runs", type=click.Path(path_type=Path), help="Where runs are kept (LOCKSTEP_RUNS, else ./runs)."
)


def _absolute(ctx: click.Context, param: click.Parameter, path: str | None) -> str | None:
    return str(Path(path).absolute()) if path else None


data_root_option = click.option(
    "--data-root",
    type=click.Path(),
    callback=_absolute,
    help="Look for the data set here first: published files, archives, or torchvision's layout.",
)


def complete_key(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
    """Shell completion of keys, and of recipe files."""
    from click.shell_completion import CompletionItem

    from lockstep.settings import all_keys

    keys = [CompletionItem(f"{key}=") for key in all_keys() if key.startswith(incomplete)]
    return keys or [CompletionItem(incomplete, type="file")]


def complete_run(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
    """Shell completion of runs: their ids, their tags, and 'last'; folders otherwise."""
    from click.shell_completion import CompletionItem

    from lockstep.run import run_folders, runs_root, tags_of

    folders = run_folders(runs_root(ctx.params.get("runs")))
    names = ["last", *dict.fromkeys(tag for folder in folders for tag in tags_of(folder)), *(f.name for f in folders)]
    found = [CompletionItem(name) for name in names if name.startswith(incomplete)]
    return found or [CompletionItem(incomplete, type="file")]


def complete_runs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
    """Shell completion of runs, and of the keys of conditions on them."""
    from click.shell_completion import CompletionItem

    from lockstep.cli.conditions import known_keys

    keys = [CompletionItem(f"{key}=") for key in known_keys() if incomplete and key.startswith(incomplete)]
    runs = complete_run(ctx, param, incomplete)
    return [*keys, *(item for item in runs if not keys or item.type == "plain")]


words_argument = click.argument("words", nargs=-1, metavar="[RECIPE.toml] [KEY=VALUE]...", shell_complete=complete_key)
