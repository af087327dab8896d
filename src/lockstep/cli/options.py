"""Options and arguments that several commands take, and the types of their numbers."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Any

import click

from lockstep.units import MOST

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


class Quantity(click.ParamType[float]):
    """A number with a unit that may be left out: 60s or 2min, 2% or 0.5%."""

    def __init__(self, name: str, units: dict[str, float], least: float, most: float) -> None:
        self.name, self._units, self._least, self._most = name, units, least, most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z%]*)", str(value))
        if not found or found[2] not in self._units:
            self.fail(f"{value!r} is not a {self.name}, such as 1{list(self._units)[1]}.", param, ctx)
        number = float(found[1]) * self._units[found[2]]
        if not self._least <= number <= self._most:
            unit = list(self._units)[1]
            least, most = (f"{bound / self._units[unit]:,.10g}{unit}" for bound in (self._least, self._most))
            self.fail(f"{value!r} is out of range: from {least} to {most}.", param, ctx)
        return number


SECONDS = Quantity("time", {"": 1.0, "s": 1.0, "min": 60.0, "h": 3600.0}, 1.0, 1e6)
SHARE = Quantity("share", {"": 0.01, "%": 0.01}, 1e-4, 0.5)

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

    keys = [CompletionItem(f"{key}=", type="nospace") for key in all_keys() if key.startswith(incomplete)]
    return keys or [CompletionItem(incomplete, type="file")]


words_argument = click.argument("words", nargs=-1, metavar="[RECIPE.toml] [KEY=VALUE]...", shell_complete=complete_key)


def read_words(words: tuple[str, ...], base: dict[str, Any] | None = None) -> tuple[Any, Any]:
    """Recipe files, names of published recipes and key=value words, in any order, as a recipe and a placement."""
    from lockstep.recipes import path_of
    from lockstep.settings import load

    files, rest = [], []
    for word in words:
        file = None if "=" in word else Path(word) if word.endswith(".toml") else path_of(word)
        if file:
            files.append(file)
        else:
            rest.append(word)
    return load(files, rest, base)


def split_script(words: tuple[str, ...]) -> tuple[tuple[str, ...], str | None, list[str]]:
    """The words for us, the user's own loop if one is named, and the words for it (those after `--`)."""
    at = next((i for i, word in enumerate(words) if word.endswith(".py") and "=" not in word), None)
    if at is None:
        return words, None, []
    ours = [word for word in words[at + 1 :] if "=" in word and not word.startswith("-")]
    theirs = [word for word in words[at + 1 :] if word not in ours]
    return (*words[:at], *ours), str(Path(words[at]).absolute()), theirs
