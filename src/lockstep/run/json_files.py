"""Small JSON files: replaced in one step, or appended to, and read back without trusting them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from lockstep.files import write_atomically
from lockstep.reading import Damaged, read_record, read_records, read_shape
from lockstep.text import finite

T = TypeVar("T")


def write_atomic(path: Path, content: Any, durable: bool = True) -> None:
    """Replace a small JSON file so that a reader sees the old one or the new one, never half."""
    write_atomically(path, json.dumps(finite(content), indent=1, allow_nan=False).encode(), durable)


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append one JSON line, in a single write unless the disk has not room for all of it."""
    data = json.dumps(finite(dict(record)), allow_nan=False).encode() + b"\n"
    with path.open("ab", buffering=0) as file:
        while data:
            data = data[file.write(data) or 0 :]


def read_json(path: Path, shape: Any = dict[str, Any]) -> dict[str, Any] | None:
    """A JSON file's object, or None where it is not there or damaged."""
    try:
        return read_record(path, shape)
    except Damaged:
        return None


def read_struct(path: Path, kind: type[T], what: str) -> T:
    """A JSON file of ours as what it was written from; the error names the folder that it belongs to."""
    try:
        found = read_shape(path, kind)
    except Damaged as error:
        raise Damaged(f"{what} {path.parent.name} is damaged, or of another version of Lockstep: {error}") from None
    if found is None:
        raise Damaged(f"{what} {path.parent}: there is no {path.name}")
    return found


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSONL file of any shape; a last line that was cut off is passed over."""
    return read_records(path, dict[str, Any])
