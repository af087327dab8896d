"""Where does a step go? Each phase's mean per rank; waiting is told apart from exchange.

All ranks leave an exchange at about the same moment, so the rank that spends least time in it came last and waited for nobody: what
it spends is the exchange itself, and what another rank spends beyond that is waiting. No common clock is needed.
"""

from __future__ import annotations

import numpy as np

from lockstep.explain.evidence import Evidence, Rows
from lockstep.explain.finding import Finding
from lockstep.explain.words import ms, percent
from lockstep.measure.records import PHASES

# A run that spends more than this between its steps is told so.
OUTSIDE = 0.2
NAMES = ("data", "forward", "backward", "exchange", "waiting", "optimizer", "other")


def split(ranks: list[Rows]) -> list[dict[str, float]]:
    """Mean seconds of each part of a step, by rank; they add up to `total`."""
    waits = waiting(ranks)
    found = []
    for rows, waited in zip(ranks, waits, strict=True):
        parts = {phase: float(rows[f"{phase}_ns"].mean()) / 1e9 for phase in PHASES}
        total = float(rows["total_ns"].mean()) / 1e9
        other = total - sum(parts.values())
        mean = float(waited.mean())
        found.append({**parts, "exchange": parts["exchange"] - mean, "waiting": mean, "other": other, "total": total})
    return found


def waiting(ranks: list[Rows]) -> list[Rows]:
    """Seconds that each rank waited for the slowest, step by step."""
    exchange = np.stack([rows["exchange_ns"] for rows in ranks]) / 1e9
    return list(exchange - exchange.min(axis=0))


def computing(ranks: list[Rows]) -> Rows:
    """Seconds that each rank (row) worked in each step (column): all but the exchange."""
    return np.stack([rows["total_ns"] - rows["exchange_ns"] for rows in ranks]) / 1e9


def answer(evidence: Evidence) -> list[Finding]:
    ranks = evidence.ranks
    if not len(ranks[0]):
        return []
    parts = split(ranks)
    mean = {name: float(np.mean([part[name] for part in parts])) for name in (*NAMES, "total")}
    most = {name: max(part[name] for part in parts) for name in (*NAMES, "total")}
    largest = max(NAMES, key=lambda name: mean[name])
    share = ", ".join(
        f"{name} {percent(mean[name] / mean['total'])}" for name in NAMES if mean[name] > 0.0005 * mean["total"]
    )
    return [
        Finding(
            question="step",
            verdict=f"most of a step is {largest}: {ms(mean[largest])} of {ms(mean['total'])}",
            why=f"mean over {len(ranks)} ranks and {len(ranks[0]):,} steps: {share}",
            next="",
            figures={"mean_s": mean, "max_s": most, "ranks": parts, "steps": len(ranks[0])},
        ),
        *_outside(evidence),
    ]


def _outside(evidence: Evidence) -> list[Finding]:
    """What the run did between steps: every rank stands still for logging and checkpoints, and evaluation is shared."""
    summary = evidence.summary
    names = {"evaluation": "eval_seconds", "logging": "logging_seconds", "checkpoints": "checkpoint_seconds"}
    seconds = {name: float(summary.get(key) or 0.0) for name, key in names.items()}
    whole = float(summary.get("train_seconds") or 0.0) + sum(seconds.values())
    share = sum(seconds.values()) / whole if whole else 0.0
    if share < OUTSIDE:
        return []
    largest = max(seconds, key=lambda name: seconds[name])
    advice = {
        "evaluation": "test_limit=… while you try things out, or fewer and longer epochs",
        "logging": "put the runs on a faster disk (--runs)",
        "checkpoints": "--checkpoint-every with a larger number",
    }
    return [
        Finding(
            question="step",
            verdict=f"{percent(share)} of the run is outside of steps, most of it {largest}",
            why=", ".join(f"{name} {ms(value)}" for name, value in seconds.items()) + f" of {ms(whole)}",
            next=advice[largest],
            cost=share,
            figures={"outside_s": seconds, "run_s": whole},
        )
    ]
