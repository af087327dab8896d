"""What was timed on this machine: how long each way takes for each layer. Kept in one file, which all processes of a machine share.

A run has a file of its own: what one of its ranks chose by is what all of them choose by, in every attempt.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import msgspec

from lockstep.files import find_once, locked
from lockstep.kernels import build
from lockstep.kernels.way import Tail
from lockstep.machine.cpu import cpu_model
from lockstep.machine.facts import VARIABLES
from lockstep.machine.native_code import folder
from lockstep.measure.environment import version_of
from lockstep.run import KERNELS_OF_RUN, read_json, write_atomic

FORMAT = 3
PLAIN = "plain"
"""PyTorch's own operators one after the other; the other names are ways inside of the fused operator, PyTorch's among them."""


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """All that the choice depends on. Batches are rounded to a power of two: a run whose last batch is shorter times a few, not all."""

    batch: int
    channels: int
    out_channels: int
    height: int
    width: int
    kernel: int
    padding: int
    relu: bool
    pool: bool
    channels_last: bool
    dtype: str
    threads: int
    learns: bool
    """Whether there will be a backward pass …"""
    grad_x: bool
    """… and whether it gives the gradient of x too: not for a net's first layer."""

    @property
    def tail(self) -> Tail:
        return Tail.RELU_POOL if self.pool else Tail.RELU if self.relu else Tail.NOTHING


class Row(msgspec.Struct, frozen=True):
    """Milliseconds of one layer by the name of each contender; `backward` is empty where the layer does not learn."""

    layer: Layer
    forward: dict[str, float]
    backward: dict[str, float]
    disturbed: bool = False
    """The machine was busy: good for the run (or the process) that measured it, and measured again by the next."""


def rounded(batch: int) -> int:
    """The nearest power of two."""
    low = 1 << (batch.bit_length() - 1)
    return low if batch * batch <= 2 * low * low else 2 * low


def find(layer: Layer, isa: str, measure: Callable[[Layer], Row]) -> Row:
    """The layer's row. Of several ranks that ask at once one looks it up or measures, and the others wait for its answer."""
    run = os.environ.get(KERNELS_OF_RUN)
    if run is None:
        return _of_machine(layer, isa, measure)
    where = Path(run)
    known = _rows_of_run(where)
    if layer not in known:
        # Not left to the machine's file: its rows may be timed again or replaced between two ranks' questions.
        with locked(where.with_name(f".{where.stem}.lock"), "timing this layer"):
            row = _read(where).get(layer)
            if row is None:
                row = _of_machine(layer, isa, measure)
                _write(where, [row])
        known[layer] = row
    return known[layer]


@cache
def _rows_of_run(where: Path) -> dict[Layer, Row]:
    return _read(where)


def _of_machine(layer: Layer, isa: str, measure: Callable[[Layer], Row]) -> Row:
    """What was timed before, undisturbed; if nothing was, it is timed now."""
    where = path(isa)
    known = _rows(where)
    if layer not in known:
        known[layer] = find_once(
            where,
            "timing this layer",
            lambda: _undisturbed(where).get(layer),
            lambda: measure(layer),
            lambda row: _write(where, [row]),
        )
    return known[layer]


def keep(rows: list[Row], isa: str) -> Path:
    """These instead of what was there for the same layers."""
    where = path(isa)
    with locked(where.with_suffix(".lock"), "timing layers"):
        _write(where, rows)
    _rows.cache_clear()
    return where


def path(isa: str) -> Path:
    """Named after the machine and the code, not after the cores that this process may use: ranks are pinned to some of them."""
    settings = [f"{name}={os.environ[name]}" for name in VARIABLES if os.environ.get(name)]
    known = f"{FORMAT} {' '.join(settings)} {cpu_model()} {version_of('torch')} {isa} {build.fingerprint(isa)}"
    return folder() / f"table-{hashlib.sha256(known.encode()).hexdigest()[:16]}.json"


@cache
def _rows(where: Path) -> dict[Layer, Row]:
    return _undisturbed(where)


def _undisturbed(where: Path) -> dict[Layer, Row]:
    return {layer: row for layer, row in _read(where).items() if not row.disturbed}


def _read(where: Path) -> dict[Layer, Row]:
    """A damaged file is as good as none: its layers are timed again."""
    try:
        rows = msgspec.convert((read_json(where) or {}).get("rows", []), type=list[Row])
    except msgspec.ValidationError:
        return {}
    return {row.layer: row for row in rows}


def _write(where: Path, rows: list[Row]) -> None:
    kept = _read(where) | {row.layer: row for row in rows}
    write_atomic(where, {"cpu": cpu_model(), "rows": msgspec.to_builtins(list(kept.values()))}, durable=False)
