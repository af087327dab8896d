"""What people write after a command, and as arguments in Python: recipe files, published recipes, key=value words, quantities with a unit.

Every command's module imports it, for its help too, so what takes long to import is imported where it is used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.placement import Placement
    from lockstep.recipe import Recipe


def read_words(words: Sequence[str], base: Mapping[str, Any] | None = None) -> tuple[Recipe, Placement]:
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


def as_words(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Settings of Python as the words that say the same: `ranks=2`, `optimizer.lr=0.001`. A table is a mapping, or `Optimizer(…)`."""
    import msgspec

    from lockstep.settings import flatten

    tree = {key: msgspec.to_builtins(v) if isinstance(v, msgspec.Struct) else v for key, v in settings.items()}
    return tuple(f"{key}={_word(key, value)}" for key, value in flatten(tree).items())


def _word(key: str, value: Any) -> str:
    from lockstep import toml
    from lockstep.errors import InputError
    from lockstep.settings import parse_value

    if value is None:
        return "none"
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, str) and parse_value(value.strip()) == value:
        return value
    try:
        return toml.written(value)
    except (TypeError, ValueError):
        raise InputError(
            f"{key}: expected a number, text, a list or a table, or the function or class that makes it, and got {type(value).__name__}"
        ) from None


class Quantity:
    """A number with a unit that may be left out: 60s or 2min, 2% or 0.5%."""

    def __init__(self, name: str, units: dict[str, float], least: float, most: float) -> None:
        self.name, self._units, self._least, self._most = name, units, least, most

    def read(self, value: object) -> float:
        """The number in base units; what is wrong is a ValueError of one line."""
        found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z%]*)", str(value))
        if not found or found[2] not in self._units:
            raise ValueError(f"{value!r} is not a {self.name}, such as 1{list(self._units)[1]}.")
        number = float(found[1]) * self._units[found[2]]
        if not self._least <= number <= self._most:
            unit = list(self._units)[1]
            least, most = (f"{bound / self._units[unit]:,.10g}{unit}" for bound in (self._least, self._most))
            raise ValueError(f"{value!r} is out of range: from {least} to {most}.")
        return number


SECONDS = Quantity("time", {"": 1.0, "s": 1.0, "min": 60.0, "h": 3600.0}, 1.0, 1e6)
SHARE = Quantity("share", {"": 0.01, "%": 0.01}, 1e-4, 0.5)
