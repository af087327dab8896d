"""Which runs people mean: names, and conditions in the language of recipe words (`ranks=2`, `optimizer.name=adam`, `accuracy>0.9`)."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import InputError
from lockstep.index import Row
from lockstep.metrics import METRICS, RECORDED
from lockstep.reading import Damaged
from lockstep.run import DAMAGED, Run
from lockstep.settings import all_keys, dotted, is_key, load, parse_value, unknown_key

_FORM = re.compile(r"([^=<>!]+)(!=|>=|<=|=|>|<)(.*)", re.DOTALL)
_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
# What a list says of a run beside its settings and its figures.
FACTS = ("state", "study", "cell", "tag")
# A target accuracy is a study's: a run alone has none.
FIGURES = tuple(dict.fromkeys([*(name for name, each in METRICS.items() if "{target}" not in each.label), *RECORDED]))
# The list itself knows these settings; others are read from the run.
_LISTED = ("model", "data", "launcher", "ranks", "threads", "precision")


def known_keys() -> list[str]:
    """Every key that a condition takes. `loss` is the recipe's; the figure is `test_loss`."""
    return list(dict.fromkeys([*FACTS, *all_keys(), *FIGURES]))


@dataclass(frozen=True)
class Condition:
    """One word: a key, how it is compared, and with what."""

    key: str
    sign: str
    value: Any
    with_: dict[str, Any]
    """Further settings that the word stands for: `hosts=emulated:2` says also that they are emulated."""

    def holds(self, row: Row, run: Run) -> bool:
        try:
            found = _value(self.key, row, run)
            same = all(_value(key, row, run) == value for key, value in self.with_.items())
        except Damaged:
            return False
        if found is None and (row["state"] == DAMAGED or not (self.key in FACTS or is_key(self.key))):
            return False  # what it does not have, or nobody can read, is neither equal nor unequal to anything
        if self.sign in _ORDER:
            number = isinstance(found, int | float) and not isinstance(found, bool)
            return number and _ORDER[self.sign](found, self.value)
        same = same and (self.value in found if isinstance(found, list) and self.key == "tag" else found == self.value)
        return same == (self.sign == "=")


def condition(word: str) -> Condition | None:
    """A word as a condition; None where it is none, and so a name."""
    form = _FORM.fullmatch(word)
    if not form:
        return None
    key, sign, text = form[1].strip().replace("-", "_"), form[2], form[3].strip()
    key = {"status": "state", "tags": "tag"}.get(key, key).removeprefix("placement.").removeprefix("recipe.")
    setting, figure = is_key(key), key in FIGURES or key.startswith("test_")
    if key in FACTS:
        if sign in _ORDER:
            raise InputError(f"{word}: '{sign}' compares numbers, and {key} is a word: write {key}={text}")
        return Condition(key, sign, text, {})
    if not setting and not figure:
        raise InputError(unknown_key(key, known_keys()))
    if sign in _ORDER or not setting:
        return Condition(key, sign, _number(word, text), {})
    # Read as a recipe's word is: the same values, and the same errors.
    settings = dotted(*load([], [f"{key}={text}"]))
    return Condition(
        key, sign, settings.get(key), {"emulated": True} if key == "hosts" and settings["emulated"] else {}
    )


def _number(word: str, text: str) -> float:
    percent = text.endswith("%")
    number = parse_value(text.removesuffix("%"))
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise InputError(f"{word}: expected a number, for example 0.9 or 90%")
    return number / 100 if percent else number


def _value(key: str, row: Row, run: Run) -> Any:
    if key in FACTS:
        return row["tags"] if key == "tag" else row[key]
    if key in _LISTED and key in row:
        return row[key]
    if is_key(key):
        return dotted(*run.spec().known()).get(key)
    from lockstep.measure.view import view

    seen = view(run)
    return METRICS[key].of(seen, None) if key in METRICS else (seen.summary() or {}).get(key)


def chosen(words: Sequence[str], root: Path, rows: Sequence[Row]) -> list[Row]:
    """Of all runs, those that are named (by id, tag, study, …) and of those, all that fulfil every condition."""
    conditions = [(word, condition(word)) for word in words]
    names = [word for word, found in conditions if found is None]
    meant = {id_ for name in names for id_ in _named(name, root, rows)}
    return [
        row
        for row in rows
        if (row["id"] in meant or not names)
        and all(found.holds(row, Run(root / row["id"])) for _, found in conditions if found)
    ]


def _named(name: str, root: Path, rows: Sequence[Row]) -> list[str]:
    if of_study := [row["id"] for row in rows if row["study"] == name]:
        return of_study
    try:
        runs = Run.find_all(name, root)
    except InputError:
        if name in known_keys():  # the shell takes an unquoted > for a redirection
            raise InputError(f"'{name}' is a key: state a value, as in {name}=…, or in quotes '{name}>…'") from None
        raise
    for run in runs:
        if not run.folder.parent.samefile(root):
            raise InputError(f"run {run.folder} is not in {root}: name its folder of runs with --runs")
    return [run.id for run in runs]
