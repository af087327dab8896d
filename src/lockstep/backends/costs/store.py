"""Where measurements of this machine are kept: one file per machine fingerprint, replaced atomically."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

import msgspec

from lockstep.backends.costs.cells import Cell
from lockstep.machine.cores import cores
from lockstep.machine.cpu import cpu_model
from lockstep.measure.environment import version_of
from lockstep.reading import Damaged, read_shape
from lockstep.run import write_atomic

FORMAT = 1


class Kept(msgspec.Struct, kw_only=True):
    """The contents of the file."""

    format: int = FORMAT
    machine: dict[str, Any]
    written: float
    cells: list[Cell]


def folder() -> Path:
    """The folder `comms` next to the data cache."""
    from lockstep.machine.cache import cache_folder

    return cache_folder().parent / "comms"


def machine() -> dict[str, Any]:
    """What a measurement depends on: another processor, number of cores or torch makes it worthless."""
    return {"cpu": cpu_model(), "cores": cores(), "torch": version_of("torch")}


def fingerprint() -> str:
    seen = machine()
    return hashlib.sha256("|".join(str(seen[name]) for name in sorted(seen)).encode()).hexdigest()[:16]


def path(cache: Path | None = None) -> Path:
    return (cache or folder()) / f"{fingerprint()}.json"


def load(cache: Path | None = None) -> list[Cell]:
    """The cells measured on a machine like this one; none where there is no file, or one of another format."""
    try:
        kept = read_shape(path(cache), Kept)
    except Damaged:
        return []
    return kept.cells if kept and kept.format == FORMAT else []


def save(cells: list[Cell], cache: Path | None = None) -> Path:
    """Keep new cells in the place of older ones of the same backend, device, ranks, collective and size."""
    kept = {key(cell): cell for cell in load(cache)} | {key(cell): cell for cell in cells}
    where = path(cache)
    where.parent.mkdir(parents=True, exist_ok=True)
    content = Kept(machine=machine(), written=time.time(), cells=list(kept.values()))
    write_atomic(where, msgspec.to_builtins(content))
    return where


def key(cell: Cell) -> tuple[str, str, int, str, int]:
    return cell.backend, cell.device, cell.ranks, cell.collective, cell.bytes
