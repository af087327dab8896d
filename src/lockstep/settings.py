"""From TOML files and key=value words to a recipe and a placement, with errors a person can act on.

Recipe and placement have no key in common, so `ranks=2 global_batch=64` needs no prefix. In a file, recipe keys stand
at the top and placement keys in the table [placement].
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from lockstep import toml
from lockstep.errors import InputError
from lockstep.placement import Placement
from lockstep.recipe import Recipe

Tree = dict[str, Any]

_RECIPE_KEYS = set(Recipe.__struct_fields__)
_PLACEMENT_KEYS = set(Placement.__struct_fields__)
# Tables within recipe and placement, by name. model_args is one too: it takes any key, because it belongs to the user's own model.
_OWNERS: dict[str, type[msgspec.Struct]] = {
    field.name: field.type
    for kind in (Recipe, Placement)
    for field in msgspec.structs.fields(kind)
    if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)
}
_OPEN = "model_args"


def all_keys() -> list[str]:
    """Every key that `key=value` takes, as people write it."""
    keys = [*Recipe.__struct_fields__, *Placement.__struct_fields__]
    inner = [f"{table}.{key}" for table, owner in _OWNERS.items() for key in sorted(owner.__struct_fields__)]
    return [key for key in keys if key not in (*_OWNERS, _OPEN)] + inner


def is_key(key: str) -> bool:
    """Whether `key=value` takes this key; any argument of a model is one."""
    table, dot, inner = key.partition(".")
    return key in all_keys() or (table == _OPEN and bool(dot and inner))


def load(
    files: Iterable[Path], words: Iterable[str], base: Mapping[str, Any] | None = None
) -> tuple[Recipe, Placement]:
    """Read files, then words, later ones over earlier ones; `base` holds defaults that both may change."""
    recipe: Tree = {}
    placement: Tree = {}
    for key, value in _hosts_first((base or {}).items()):
        _put(key, value, recipe, placement)
    for path in files:
        _merge_file(path, recipe, placement)
    pairs = []
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise InputError(f"'{word}' is not key=value, for example global_batch=64 (nor is it a recipe file)")
        key = key.strip().replace("-", "_")
        # "none" leaves a setting out, but where it is one of its values.
        value = "none" if text.strip() == "none" and "none" in _choices(key) else parse_value(text.strip())
        if problem := toml.why_not(value) if not isinstance(value, list) else "":
            raise InputError(f"{key}={text}: {problem}")
        pairs.append((key, value))
    for key, value in _hosts_first(pairs):
        _put(key, value, recipe, placement)
    return _convert(recipe, Recipe), _convert(placement, Placement)


def _hosts_first(pairs: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """`hosts` says also whether hosts are emulated, over what earlier sources said; within one source `emulated` has the last word."""
    return sorted(pairs, key=lambda pair: pair[0].removeprefix("placement.") != "hosts")


def parse_value(text: str) -> Any:
    """A TOML value where it is one (numbers, true, [lists], "text"), else the text as it stands."""
    try:
        value = toml.loads(f"value = {text}")["value"]
        if isinstance(value, list):
            toml.check(value, text)
    except toml.NotToml:
        return None if text == "none" else text
    return value if isinstance(value, bool | int | float | str | list) else text


def as_toml(recipe: Recipe, placement: Placement) -> str:
    """The resolved settings as a file that `lockstep run` takes again. Nested tables list only the keys that differ from their defaults."""
    lines = [*_toml_lines(recipe, Recipe()), "", "[placement]", *_toml_lines(placement, Placement())]
    return "\n".join(lines) + "\n"


def _toml_lines(chosen: Any, default: Any) -> list[str]:
    usual, lines = msgspec.to_builtins(default), []
    for key, value in msgspec.to_builtins(chosen).items():
        if isinstance(value, dict):
            lines += [
                f"{key}.{toml.key(inner)} = {toml.written(one)}"
                for inner, one in value.items()
                if one is not None and one != usual[key].get(inner)
            ]
        elif value is not None:
            lines.append(f"{key} = {toml.written(value)}")
    return lines


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Tree:
    """Nested settings by the dotted keys that `key=value` takes."""
    found: Tree = {}
    for key, value in tree.items():
        found |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found


def changed(recipe: Recipe, placement: Placement) -> Tree:
    """What is not at its default, by dotted keys."""
    usual = dotted(Recipe(), Placement())
    return {key: value for key, value in dotted(recipe, placement).items() if key not in usual or usual[key] != value}


def dotted(*settings: Recipe | Placement | Mapping[str, Any]) -> Tree:
    """Every setting by its dotted key; a recipe and a placement have no key in common."""
    return {key: value for each in settings for key, value in flatten(msgspec.to_builtins(each)).items()}


def _merge_file(path: Path, recipe: Tree, placement: Tree) -> None:
    content = toml.read(path, "recipe file")
    try:
        _merge(content, recipe, placement, prefix="")
    except InputError as error:
        raise InputError(f"{error} (in {path})") from None


def _merge(content: Tree, recipe: Tree, placement: Tree, prefix: str) -> None:
    for key, value in content.items():
        if not prefix and key == "placement" and isinstance(value, dict):
            for inner, inner_value in _hosts_first(value.items()):
                if isinstance(inner_value, dict):
                    _merge(inner_value, recipe, placement, prefix=f"{inner}.")
                    continue
                if inner in _RECIPE_KEYS:
                    raise InputError(
                        f"unknown key '{inner}' in [placement]: it is a recipe key, and stands above that table"
                    )
                if inner not in _PLACEMENT_KEYS:
                    raise InputError(unknown_key(inner))
                _put(inner, inner_value, recipe, placement)
        elif isinstance(value, dict):
            _merge(value, recipe, placement, prefix=f"{prefix}{key}.")
        else:
            _put(prefix + key, value, recipe, placement)


def _put(key: str, value: Any, recipe: Tree, placement: Tree) -> None:
    key = key.removeprefix("placement.").removeprefix("recipe.")
    table, dot, inner = key.partition(".")
    if dot and table in (*_OWNERS, _OPEN) and "." not in inner:
        if table != _OPEN and inner not in _OWNERS[table].__struct_fields__:
            raise InputError(unknown_key(key))
        (placement if table in _PLACEMENT_KEYS else recipe).setdefault(table, {})[inner] = value
    elif key in (*_OWNERS, _OPEN):
        part = "NAME" if key == _OPEN else _OWNERS[key].__struct_fields__[0]
        raise InputError(f"{key}={value}: state its parts, for example {key}.{part}=…")
    elif key == "hosts":
        match = re.fullmatch(r"emulated:(\d+)", value) if isinstance(value, str) else None
        placement |= {"hosts": int(match[1]) if match else value, "emulated": match is not None}
    elif key in _RECIPE_KEYS:
        recipe[key] = value
    elif key in _PLACEMENT_KEYS:
        placement[key] = value
    else:
        raise InputError(unknown_key(key))


# People also leave out a table's name (lr) or write the common short name (batch).
_ALIASES = {
    "batch": "global_batch",
    "batch_size": "global_batch",
    "batchsize": "global_batch",
    "criterion": "loss",
    "dataset": "data",
    "gpus": "ranks",
    "learning_rate": "optimizer.lr",
    "nodes": "hosts",
    "wd": "optimizer.weight_decay",
    "workers": "ranks",
    "world_size": "ranks",
}
# Below this likeness a suggestion is a guess: 'lost' is as near to 'hosts' as 0.67.
_ALIKE = 0.72


def unknown_key(key: str, known: list[str] | None = None) -> str:
    """What to say of a key that is not one, with the one that was probably meant."""
    keys = known or all_keys()
    by_last_part = {name.rpartition(".")[2]: name for name in keys}
    near = (
        _ALIASES.get(key)
        or by_last_part.get(key)
        or next(iter(difflib.get_close_matches(key, keys, n=1, cutoff=_ALIKE)), None)
        or by_last_part.get(next(iter(difflib.get_close_matches(key, by_last_part, n=1, cutoff=_ALIKE)), ""))
    )
    return f"unknown key '{key}'" + (f": did you mean '{near}'?" if near else f": known keys are {', '.join(keys)}")


S = TypeVar("S", bound=msgspec.Struct)


def checked(settings: S) -> S:
    """Settings that were made in Python, held to the same rules as words: a class does not check what it is made with."""
    for key in settings.__struct_fields__:
        value = getattr(settings, key)
        if callable(value):
            raise InputError(f"{key}={getattr(value, '__qualname__', value)}: {_how_to_name(key, value)}")
    try:
        tree: Tree = msgspec.to_builtins(settings)
    except (TypeError, ValueError) as error:
        raise InputError(f"{type(settings).__name__}: {error}") from None
    found: S = _convert(tree, type(settings))
    return found


def _how_to_name(key: str, value: Any) -> str:
    """Ranks are processes of their own: they import what a name says, and know nothing of this one's objects."""
    where, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "Net")
    if where in (None, "__main__") or "<" in name:
        name = "NAME" if "<" in name else name
        return f"ranks import it: give it to lockstep.run({key}={name}), or write it into a file and state {key}='path/to/file.py:{name}'"
    return f"ranks import it: state {key}='{where}:{name}'"


def _convert(tree: Tree, kind: type[Any]) -> Any:
    try:
        return msgspec.convert(tree, kind)
    except msgspec.ValidationError as error:
        raise InputError(reword(str(error), tree)) from None


_WORDS = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false", "object": "a table"}


def reword(message: str, tree: Tree) -> str:
    """msgspec's "Expected `int` >= 1 - at `$.epochs`" as "epochs=0: expected a whole number >= 1"."""
    place = re.search(r" - at `\$\.(.+)`$", message)
    key = place.group(1) if place else "?"
    value: Any = tree
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    text = message[: place.start()] if place else message
    text = re.sub(r", got `\w+`$", "", text)
    text = re.sub(
        r"`([\w |]+)`", lambda m: " or ".join(_WORDS.get(w, w) for w in m.group(1).split(" | ") if w != "null"), text
    )
    text = text[:1].lower() + text[1:]
    if text.startswith("invalid enum value"):
        text = f"expected {_forms(key)}"
    return f"{key}: {text}" if "[" in key else f"{key}={value}: {text}"  # within a list, the value is not looked up


def _choices(key: str) -> list[str]:
    """The values a Literal key takes."""
    return sorted(value for hint in _hints(key) if get_origin(hint) is Literal for value in get_args(hint))


def _forms(key: str) -> str:
    """What a key takes, in words: its choices, and a list or a switch where that is possible too."""
    choices, hints = ", ".join(_choices(key)), _hints(key)
    if any(get_origin(hint) is list for hint in hints):
        return f"{choices}, or a list such as [3,1]"
    return f"{choices}, true or false" if bool in hints else f"one of {choices}"


def _hints(key: str) -> list[Any]:
    """The types a key may have, from the struct that owns it."""
    table, _, inner = key.rpartition(".")
    owner = _OWNERS.get(table) or (Recipe if key in _RECIPE_KEYS else Placement)
    found = [field.type for field in msgspec.structs.fields(owner) if field.name == inner]
    return [part for hint in found for part in (get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,))]
