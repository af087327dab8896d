"""What was measured between hosts: kept apart from what backend=auto reads, by what lies between the hosts.

One file for all: a cluster's nodes share it, whichever of them asks. What was measured between emulated hosts belongs to the kind of machine
that emulated them.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from lockstep.backends.costs import store
from lockstep.backends.costs.cells import Cell
from lockstep.placement import Placement
from lockstep.reading import Damaged, read_shape
from lockstep.run import write_atomic
from lockstep.units import counted

FORMAT = 1
FILE = "between-hosts.json"


class Measured(msgspec.Struct, kw_only=True):
    """One kind of hosts and link, with one number of hosts and ranks."""

    kind: str
    """In words: emulated hosts, 1gbit,0.5ms; Slurm, partition debug."""
    machine: str = ""
    """The fingerprint of the machine that emulated them; empty for real hosts."""
    hosts: int
    ranks: int
    words: str
    """What `lockstep comms` was told."""
    cells: list[Cell]

    @property
    def time(self) -> float:
        return max((cell.time for cell in self.cells), default=0.0)

    def text(self) -> str:
        when = time.strftime("%Y-%m-%d", time.localtime(self.time))
        return f"measured {when} with {counted(self.ranks, 'rank')} on {counted(self.hosts, 'host')} ({self.kind})"


class _Kept(msgspec.Struct, kw_only=True):
    format: int = FORMAT
    measured: list[Measured]


def kind_of(placement: Placement) -> str:
    """What lies between the hosts of a placement, in words."""
    if placement.emulated:
        return f"emulated hosts, {placement.link or 'no limits'}"
    partition = placement.slurm.partition if placement.launcher == "slurm" else None
    name = "Slurm" if placement.launcher == "slurm" else placement.launcher
    return f"{name}, partition {partition}" if partition else name


def words_of(placement: Placement) -> str:
    """The words of `lockstep comms` that measure there."""
    hosts = f"emulated:{placement.hosts}" if placement.emulated else str(placement.hosts)
    words = [f"hosts={hosts}", f"ranks={placement.ranks}"]
    words += [f"link={placement.link}"] if placement.link else []
    words += [f"launcher={placement.launcher}"] if placement.launcher not in ("auto", "spawn") else []
    words += [f"slurm.partition={placement.slurm.partition}"] if placement.slurm.partition else []
    return " ".join(words)


def path(cache: Path | None = None) -> Path:
    return (cache or store.folder()) / FILE


def load(cache: Path | None = None) -> list[Measured]:
    """All of them, the newest first; none where there is no file, or one of another format."""
    try:
        kept = read_shape(path(cache), _Kept)
    except Damaged:
        return []
    found = kept.measured if kept and kept.format == FORMAT else []
    here = store.fingerprint()
    return sorted((one for one in found if one.machine in ("", here)), key=lambda one: one.time, reverse=True)


def save(placement: Placement, cells: list[Cell], cache: Path | None = None) -> Path:
    """New cells take the place of older ones of the same hosts, ranks, backend, device, collective and size."""
    try:
        before = read_shape(path(cache), _Kept)
    except Damaged:
        before = None
    kept = {_key(one): one for one in (before.measured if before and before.format == FORMAT else [])}
    new = Measured(
        kind=kind_of(placement),
        machine=store.fingerprint() if placement.emulated else "",
        hosts=placement.hosts,
        ranks=placement.ranks,
        words=words_of(placement),
        cells=cells,
    )
    if old := kept.get(_key(new)):
        together = {store.key(cell): cell for cell in (*old.cells, *cells)}
        new = msgspec.structs.replace(new, cells=list(together.values()))
    kept[_key(new)] = new
    where = path(cache)
    where.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(where, msgspec.to_builtins(_Kept(measured=list(kept.values()))))
    return where


def _key(one: Measured) -> tuple[str, str, int, int]:
    return one.kind, one.machine, one.hosts, one.ranks
