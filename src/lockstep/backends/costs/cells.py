"""One measured cell, its figures, and the lines fitted through several."""

from __future__ import annotations

import statistics

import msgspec

from lockstep.backends.costs.fit import Line, fit
from lockstep.backends.costs.plan import bandwidths


class Cell(msgspec.Struct, kw_only=True):
    """One collective at one size on one backend: what was measured, or why not."""

    backend: str
    device: str
    ranks: int
    collective: str
    bytes: int
    """The size asked for."""
    message_bytes: int = 0
    """The size of the message: a divided one is rounded up to whole floats for every rank."""
    state: str = "ok"
    """ok, WRONG, unsupported, failed, hang."""
    reason: str | None = None
    n: int = 0
    checks: int = 0
    """Results compared in full, on every rank."""
    median_us: float | None = None
    p5_us: float | None = None
    p95_us: float | None = None
    min_us: float | None = None
    mean_us: float | None = None
    algorithm_gbs: float | None = None
    bus_gbs: float | None = None
    round_medians_us: list[float] = []
    time: float = 0.0


class Fitted(msgspec.Struct, frozen=True, kw_only=True):
    backend: str
    device: str
    ranks: int
    collective: str
    line: Line


def summarise(cell: Cell, rounds: list[list[int]]) -> None:
    """Median, spread and bandwidths over the calls of all rounds."""
    import numpy as np  # not above: whoever only reads cells has no use for it

    samples = sorted(sample / 1e3 for one in rounds for sample in one)
    cell.n = len(samples)
    cell.median_us, cell.min_us, cell.mean_us = statistics.median(samples), samples[0], statistics.fmean(samples)
    cell.p5_us, cell.p95_us = np.quantile(samples, (0.05, 0.95)).tolist()
    cell.round_medians_us = [statistics.median(one) / 1e3 for one in rounds]
    both = bandwidths(cell.collective, cell.bytes, cell.ranks, cell.median_us / 1e6)
    if both:
        cell.algorithm_gbs, cell.bus_gbs = both


def lines(cells: list[Cell]) -> list[Fitted]:
    """The alpha-beta line of every backend and collective that was measured at three sizes or more."""
    groups: dict[tuple[str, str, int, str], list[tuple[float, float]]] = {}
    for cell in cells:
        if cell.state == "ok" and cell.median_us and cell.message_bytes:
            key = (cell.collective, cell.device, cell.ranks, cell.backend)
            groups.setdefault(key, []).append((cell.message_bytes, cell.median_us / 1e6))
    found = []
    for (collective, device, ranks, backend), points in groups.items():
        line = fit(points)
        if line:
            found.append(Fitted(backend=backend, device=device, ranks=ranks, collective=collective, line=line))
    return found
