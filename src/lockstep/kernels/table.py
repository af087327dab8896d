"""What was measured: how long each way takes, for each shape. Built in is one table; `lockstep kernels bench --keep` makes this machine's."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from lockstep.machine.cpu import cpu_model
from lockstep.measure.environment import version_of
from lockstep.placement import cores
from lockstep.run import read_json, write_atomic

BUILT_IN = Path(__file__).with_name("table.json")
FORMAT = 1


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Median milliseconds by the name of each way ("torch" is PyTorch's own operators), for one shape."""

    channels: int
    width: int
    """Output channels."""
    size: int
    """Height and width of the image; its root of height x width where they differ."""
    kernel: int
    pool: bool
    batch: int
    threads: int
    grad_x: bool
    last: bool = False
    """Whether x lies in channels-last order."""
    dtype: str = "float32"
    forward: dict[str, float]
    backward: dict[str, float]


# Where nothing was measured with an instruction set, that of a relative stands in: both we and PyTorch gain from wider vectors.
STANDS_IN = {"avx512": "avx2"}


@cache
def rows(isa: str) -> tuple[Row, ...]:
    """This machine's own rows, else the built-in ones."""
    built_in = json.loads(BUILT_IN.read_text())
    return _rows_of(read_json(path()), isa) or _rows_of(built_in, isa) or _rows_of(built_in, STANDS_IN.get(isa, ""))


def _rows_of(content: Any, isa: str) -> tuple[Row, ...]:
    if not content or content.get("format") != FORMAT or content.get("isa") != isa:
        return ()
    try:
        return tuple(msgspec.convert(content["rows"], type=list[Row]))
    except (msgspec.ValidationError, KeyError):
        return ()


def path() -> Path:
    """Another processor or torch has a table of its own."""
    from lockstep.kernels.build import folder

    seen = f"{cpu_model()} {cores()} {version_of('torch')}"
    return folder() / f"table-{hashlib.sha256(seen.encode()).hexdigest()[:16]}.json"


def document(measured: list[Row], isa: str, machine: dict[str, Any]) -> dict[str, Any]:
    return {"format": FORMAT, "isa": isa, "machine": machine, "rows": msgspec.to_builtins(measured)}


def save(content: dict[str, Any]) -> Path:
    """As this machine's own."""
    where = path()
    where.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(where, content)
    rows.cache_clear()
    return where


def write(where: Path, content: dict[str, Any]) -> None:
    """A row to a line, so that a change of the built-in table can be read."""
    head = {key: value for key, value in content.items() if key != "rows"}
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in content["rows"])
    where.write_text(f'{json.dumps(head)[:-1]}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")
