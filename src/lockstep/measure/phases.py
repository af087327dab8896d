"""Where a step goes: the mean time of each phase, per rank and over all ranks. The phases add up to the step.

Definition: a phase's time is its mean over the steps after warm-up; "other" is what no phase accounts for; a step's
time is the maximum over ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lockstep.measure.records import PHASES, read_steps
from lockstep.run import Run

NAMES = (*PHASES, "other")


def _settled(run: Run, rank: int) -> np.ndarray[Any, Any]:
    """The steps after warm-up, or all of them where there are no others."""
    rows = read_steps(run.rank_folder(rank) / "steps.bin")
    return rows[rows["warmup"] == 0] if (rows["warmup"] == 0).any() else rows


def rank_phases(run: Run, rank: int) -> dict[str, float] | None:
    """Mean nanoseconds of each phase of one rank, and of the whole step."""
    rows = _settled(run, rank)
    if not len(rows):
        return None
    means = {name: float(rows[f"{name}_ns"].mean()) for name in PHASES}
    total = float(rows["total_ns"].mean())
    return {**means, "other": total - sum(means.values()), "total": total}


def step_phases(run: Run) -> dict[str, Any] | None:
    """Phases as the mean over ranks, with the step's time as the maximum over ranks."""
    ranks = run.spec().plan.ranks
    parts = [rank_phases(run, rank) for rank in range(ranks)]
    known = [part for part in parts if part]
    if not known:
        return None
    steps = [_settled(run, rank)["total_ns"] for rank in range(ranks)]
    length = min(len(s) for s in steps)
    slowest = np.max([s[:length] for s in steps], axis=0) if length else np.zeros(1)
    mean = {name: float(np.mean([part[name] for part in known])) for name in (*NAMES, "total")}
    return {
        "mean_ns": mean,
        "step_ns": {
            "mean": float(slowest.mean()),
            "median": float(np.median(slowest)),
            "p95": float(np.percentile(slowest, 95)),
        },
        "ranks": parts,
    }


def phases_line(phases: dict[str, Any]) -> str:
    """One line: the step's time and the share of each phase."""
    mean = phases["mean_ns"]
    shares = ", ".join(f"{name} {mean[name] / mean['total']:.0%}" for name in NAMES)
    return f"a step takes {phases['step_ns']['median'] / 1e6:.2f} ms (median): {shares}"
