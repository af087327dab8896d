"""Where a step goes: the mean time of each phase, per rank and over all ranks. The phases add up to the step.

Definition: a phase's time is its mean over the steps after warm-up; "other" is what no phase accounts for; a step's
time is the maximum over ranks.

All ranks leave an exchange at about the same moment, so the rank that spends the least time in it came last and waited for nobody.
Its time is the exchange itself, and what another rank spends beyond that is waiting. No common clock is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lockstep.measure.records import PHASES

Rows = np.ndarray[Any, Any]
Parts = dict[str, float]
TIMED = (*PHASES, "other")
NAMES = ("data", "forward", "backward", "exchange", "waiting", "optimizer", "other")


def after_warmup(rows: Rows) -> Rows:
    """The steps after warm-up, or all of them if there are no others."""
    return rows[rows["warmup"] == 0] if (rows["warmup"] == 0).any() else rows


def common(ranks: Sequence[Rows]) -> list[Rows]:
    """Cut to the steps that all ranks have."""
    length = min((len(rows) for rows in ranks), default=0)
    return [rows[:length] for rows in ranks]


def split(ranks: Sequence[Rows]) -> list[Parts]:
    """Mean seconds of each part of a step, by rank; they add up to `total`."""
    if not ranks or not len(ranks[0]):
        return []
    found = []
    for rows, waited in zip(ranks, waiting(ranks), strict=True):
        parts = {name: nanoseconds / 1e9 for name, nanoseconds in _means(rows).items()}
        mean = float(waited.mean())
        found.append({**parts, "exchange": parts["exchange"] - mean, "waiting": mean})
    return found


def waiting(ranks: Sequence[Rows]) -> list[Rows]:
    """Seconds that each rank waited for the slowest, step by step."""
    exchange = np.stack([rows["exchange_ns"] for rows in ranks]) / 1e9
    return list(exchange - exchange.min(axis=0))


def last_in(ranks: Sequence[Rows]) -> list[float]:
    """In what share of the steps each rank came last, so that the others waited for it."""
    exchange = np.stack([rows["exchange_ns"] for rows in ranks])
    return [float(share) for share in np.bincount(exchange.argmin(axis=0), minlength=len(ranks)) / exchange.shape[1]]


def waited_for(ranks: Sequence[Rows]) -> str:
    """Whom the others waited for most often."""
    shares = last_in(ranks)
    rank = max(range(len(shares)), key=shares.__getitem__)
    return f"rank {rank} came last in {shares[rank]:.0%} of the steps"


def computing(ranks: Sequence[Rows]) -> Rows:
    """Seconds that each rank (row) worked in each step (column): all but the exchange."""
    return np.stack([rows["total_ns"] - rows["exchange_ns"] for rows in ranks]) / 1e9


def _means(rows: Rows) -> Parts:
    """Mean nanoseconds of each phase of one rank, and of the whole step."""
    means = {name: float(rows[f"{name}_ns"].mean()) for name in PHASES}
    total = float(rows["total_ns"].mean())
    return {**means, "other": total - sum(means.values()), "total": total}


def step_phases(ranks: Sequence[Rows]) -> dict[str, Any] | None:
    """Phases as the mean over ranks, with the step's time as the maximum over ranks."""
    warm = [after_warmup(rows) for rows in ranks]
    parts = [_means(rows) if len(rows) else None for rows in warm]
    known = [part for part in parts if part]
    if not known:
        return None
    steps = [rows["total_ns"] for rows in common(warm)]
    slowest = np.max(steps, axis=0) if len(steps[0]) else np.zeros(1)
    mean = {name: float(np.mean([part[name] for part in known])) for name in (*TIMED, "total")}
    return {
        "mean_ns": mean,
        "step_ns": {
            "mean": float(slowest.mean()),
            "median": float(np.median(slowest)),
            "p95": float(np.percentile(slowest, 95)),
        },
        "ranks": parts,
    }


def told_apart(phases: dict[str, Any], ranks: Sequence[Parts]) -> Parts:
    """The mean seconds of each phase over ranks, waiting apart from exchange where several ranks have recorded the same steps (`split`)."""
    if len(ranks) > 1:
        return {name: sum(part[name] for part in ranks) / len(ranks) for name in (*NAMES, "total")}
    return {name: phases["mean_ns"][name] / 1e9 for name in (*TIMED, "total")}


def phases_line(phases: dict[str, Any], ranks: Sequence[Parts] = ()) -> str:
    """The time of a step and the share of each phase."""
    mean = told_apart(phases, ranks)
    shares = ", ".join(f"{name} {mean[name] / mean['total']:.0%}" for name in NAMES if name in mean)
    return f"{phases['step_ns']['median'] / 1e6:.2f} ms (median): {shares}"
