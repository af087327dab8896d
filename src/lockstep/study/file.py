"""The study file: a base, what is varied over it, and how often. From TOML, or made in Python.

repeats = 5
baseline = "spawn"

[recipe]
data = "mnist"
[placement]
ranks = 2

[factors]                       # every combination becomes a cell
global_batch = [32, 256]
[factors.launch.spawn]          # a factor of named bundles of keys
launcher = "spawn"
[factors.launch.torchrun]
launcher = "torchrun"

[cells.alone]                   # or (and) single cells, each a bundle of keys
ranks = 1

[quick]                         # what --quick changes
repeats = 3
train_limit = 6000
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from lockstep import toml
from lockstep.errors import InputError
from lockstep.placement import Placement
from lockstep.recipe import Recipe
from lockstep.settings import changed, parse_value, reword
from lockstep.settings import flatten as dotted
from lockstep.study.definition import Keys, Study, check, nearest

_TABLES = ("recipe", "placement", "factors", "cells", "quick", "published")
_MANY_CELLS = 10_000


def make(
    name: str,
    recipe: Recipe | None = None,
    placement: Placement | None = None,
    factors: Mapping[str, Any] | None = None,
    cells: Mapping[str, Mapping[str, Any]] | None = None,
    **more: Any,
) -> Study:
    """A study from Python.

    >>> from lockstep.study import make
    >>> study = make("mine", factors={"ranks": [1, 2]}, repeats=3)
    >>> list(study.all_cells())
    ['ranks=1', 'ranks=2']
    """
    base = changed(recipe or Recipe(), placement or Placement())
    return from_tree({**more, "recipe": base, "factors": dict(factors or {}), "cells": dict(cells or {})}, name)


def read(path: Path) -> Study:
    """A study from its TOML file."""
    content = toml.read(path, "study file")
    # A recipe file is named relative to the study file.
    if isinstance(content.get("files"), list):
        content["files"] = [str(path.parent / str(file)) for file in content["files"]]
    try:
        return from_tree(content, path.stem)
    except InputError as error:
        raise InputError(f"{error} (in {path})") from None


def from_tree(content: Mapping[str, Any], name: str) -> Study:
    """A study from what TOML holds, with errors a person can act on; every cell's keys are checked."""
    tree = {"name": name, **content}
    known = [*Study.__struct_fields__, *_TABLES]
    for key in tree:
        if key not in known or key == "base":
            hint = nearest(key, known, "recipe keys stand in [recipe], placement keys in [placement]")
            raise InputError(f"unknown study key '{key}': {hint}")
    for key in _TABLES:
        if key != "published" and not isinstance(tree.get(key, {}), dict):
            raise InputError(f"{key}: expected a table, [{key}]")
    base = {**flatten(tree.pop("recipe", {})), **flatten(tree.pop("placement", {}))}
    tree |= {"base": base, "factors": _factors(tree.get("factors", {})), "quick": flatten(tree.get("quick", {}))}
    tree["cells"] = {cell: _keys(cell, keys) for cell, keys in tree.get("cells", {}).items()}
    return check(_study(tree))


def _study(tree: Keys) -> Study:
    try:
        return msgspec.convert(tree, Study)
    except msgspec.ValidationError as error:
        raise InputError(f"study '{tree['name']}': {reword(str(error), tree)}") from None


def _factors(tree: Keys) -> dict[str, dict[str, Keys]]:
    """A list is a key with several values; a table of tables is a factor of named bundles."""
    found: dict[str, dict[str, Keys]] = {}
    size = 1
    for name, value in tree.items():
        if isinstance(value, dict) and value and all(isinstance(inner, dict) for inner in value.values()):
            found[name] = {level: _keys(f"factors.{name}.{level}", keys) for level, keys in value.items()}
        else:
            found |= {key: _levels(key, values) for key, values in flatten({name: value}).items()}
    for levels in found.values():
        size *= len(levels)
    if size > _MANY_CELLS:
        raise InputError(
            f"factors: {size:,} cells are more than {_MANY_CELLS:,}: vary less, or list the cells in [cells.NAME]"
        )
    return found


def _levels(key: str, values: Any) -> dict[str, Keys]:
    if not isinstance(values, list) or not values:
        raise InputError(f"factors.{key}={values}: expected a list of values, for example {key} = [1, 2]")
    levels = {f"{key}={value if isinstance(value, str) else json.dumps(value)}": {key: value} for value in values}
    if len(levels) < len(values):
        raise InputError(f"factors.{key}={values}: a value is there twice")
    return levels


def _keys(where: str, keys: Any) -> Keys:
    if not isinstance(keys, dict):
        raise InputError(f"{where}: expected a table of keys, for example ranks = 2")
    return flatten(keys)


def flatten(tree: Mapping[str, Any]) -> Keys:
    """Nested tables as dotted keys. [placement] and [recipe] mean nothing more than their keys."""
    found: Keys = {}
    for key, value in tree.items():
        only_keys = key in ("recipe", "placement") and isinstance(value, Mapping)
        found |= dotted(value if only_keys else {key: value})
    return found


def with_words(study: Study, words: Iterable[str], quick: bool = False, repeats: int | None = None) -> Study:
    """Apply --quick, then key=value arguments, then --repeats to a study."""
    changes: Keys = dict(study.quick) if quick else {}
    if quick and not changes:
        raise InputError(f"study '{study.name}' has no [quick] table: leave out --quick, or change keys as words")
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise InputError(f"'{word}' is not key=value, for example train_limit=6000")
        changes[key.strip().replace("-", "_")] = parse_value(text.strip())
    if repeats is not None:
        changes["repeats"] = repeats
    return check(_change(study, changes))


# Keys of the study itself that --quick and words may change.
_OWN = ("repeats", "seeds", "race_minutes", "budget_minutes", "target_accuracy", "metrics", "baseline")


def _change(study: Study, changes: Keys) -> Study:
    base, factors, own = dict(study.base), dict(study.factors), {}
    for key, value in changes.items():
        varied = [cell for cell, keys in study.all_cells().items() if key in keys]
        if key in _OWN:
            own[key] = value
        elif key in factors:
            factors[key] = _levels(key, value if isinstance(value, list) else [value])
        elif varied:
            raise InputError(
                f"{key}={value}: the cells of study '{study.name}' set it themselves (for example '{varied[0]}')"
            )
        else:
            base[key] = value
    tree = {**msgspec.to_builtins(study), **own, "base": base, "factors": factors}
    # If arguments removed levels, remarks about those cells are removed too.
    cells = _study(tree).all_cells()
    if "baseline" not in own and study.baseline not in cells:
        tree["baseline"] = None
    for published in tree["published"]:
        published["claims"] = [c for c in published["claims"] if c["more"] in cells and c["less"] in cells]
    return _study(tree)
