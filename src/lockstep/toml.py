"""TOML from people: read with one error for all that can be wrong with it, and with nothing in it that no setting can be."""

from __future__ import annotations

import json
import math
import re
import tomllib
from pathlib import Path
from typing import Any

from lockstep.errors import InputError
from lockstep.reading import Damaged, read_file
from lockstep.text import is_text

# Settings have at most three levels (a study's factors and cells); ten are certainly a slip.
DEEPEST = 10
LARGEST = 4 << 20


class NotToml(ValueError):
    """The text is not TOML, or holds what no setting can be."""


def parse(text: str) -> dict[str, Any]:
    found = loads(text)
    check(found, "", 0)
    return found


def loads(text: str) -> dict[str, Any]:
    """TOML as it stands, whatever its values are."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise NotToml("it is nested too deeply") from None
    except tomllib.TOMLDecodeError as error:
        raise NotToml(str(error)) from None
    except ValueError:  # Python refuses to read a number of more than 4,300 digits
        raise NotToml("a number has too many digits") from None


def read(path: Path, what: str) -> dict[str, Any]:
    """A file that the user named; `what` says in the error which kind of file it is."""
    try:
        data = read_file(path, LARGEST)
        if data is None:
            raise InputError(f"{what} {path}: No such file or directory")
        return parse(data.decode())
    except Damaged as error:
        raise InputError(f"{what} {path.parent / str(error)}") from None
    except (NotToml, UnicodeDecodeError) as error:
        raise InputError(f"{what} {path} is not TOML: {error}") from None


def written(value: Any) -> str:
    """A value as TOML takes it. JSON's way is TOML's too, but for one control character that it leaves as it is."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def key(name: str) -> str:
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else written(name)


def check(value: Any, where: str, depth: int = 0) -> None:
    """Raise NotToml where something in it can be no setting."""
    if depth > DEEPEST:
        raise NotToml(f"{where[:40]}…: it is nested too deeply")
    if isinstance(value, dict):
        for key, inner in value.items():
            if not is_text(key) or "\0" in key:
                raise NotToml(f"the key {key!r} is not valid text")
            check(inner, f"{where}.{key}" if where else key, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            check(inner, where, depth + 1)
    elif problem := why_not(value):
        raise NotToml(f"{where}={str(value)[:60]!r}: {problem}")


def why_not(value: Any) -> str:
    """Why something can be the value of no setting; empty where it can."""
    if isinstance(value, str):
        return "" if is_text(value) and "\0" not in value else "not valid text"
    if isinstance(value, float) and not math.isfinite(value):
        return "expected a finite number"
    if isinstance(value, int) and abs(value) >= 1 << 63:
        return "a number beyond 2^63"
    return (
        ""
        if value is None or isinstance(value, bool | int | float)
        else "a date or time is no setting; text stands in quotes"
    )
