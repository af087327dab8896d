"""Where measurements of this machine are kept: one file per machine fingerprint, replaced atomically."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

import msgspec

from lockstep.comms.cells import Cell
from lockstep.machine.cpu import cpu_model
from lockstep.measure.environment import version_of
from lockstep.placement import cores
from lockstep.run import read_json, write_atomic

FORMAT = 1


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
    content = read_json(path(cache))
    if not content or content.get("format") != FORMAT:
        return []
    try:
        return msgspec.convert(content["cells"], type=list[Cell])
    except (msgspec.ValidationError, KeyError):
        return []


def save(cells: list[Cell], cache: Path | None = None) -> Path:
    """Keep new cells in the place of older ones of the same backend, device, ranks, collective and size."""
    kept = {_key(cell): cell for cell in load(cache)} | {_key(cell): cell for cell in cells}
    where = path(cache)
    where.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "format": FORMAT,
        "machine": machine(),
        "written": time.time(),
        "cells": msgspec.to_builtins(list(kept.values())),
    }
    write_atomic(where, content)
    return where


def _key(cell: Cell) -> tuple[str, str, int, str, int]:
    return cell.backend, cell.device, cell.ranks, cell.collective, cell.bytes
