"""Where does a step go? Each phase's mean per rank (`measure.phases`); waiting is told apart from exchange."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.explain.evidence import Evidence
from lockstep.explain.finding import Finding
from lockstep.measure.phases import NAMES
from lockstep.units import duration, percent

# A larger share of time between steps is reported.
OUTSIDE = 0.2


def answer(evidence: Evidence) -> Iterator[Finding]:
    parts, mean = evidence.run.split(), evidence.step
    if not parts:
        return
    steps = len(evidence.ranks[0])
    most = {name: max(part[name] for part in parts) for name in mean}
    largest = max(NAMES, key=lambda name: mean[name])
    share = ", ".join(
        f"{name} {percent(mean[name] / mean['total'])}" for name in NAMES if mean[name] > 0.0005 * mean["total"]
    )
    yield Finding(
        verdict=f"most of a step is {largest}: {duration(mean[largest])} of {duration(mean['total'])}",
        why=f"mean over {len(parts)} ranks and {steps:,} steps: {share}",
        figures={"mean_s": mean, "max_s": most, "ranks": parts, "steps": steps},
    )
    yield from _outside(evidence)


def _outside(evidence: Evidence) -> Iterator[Finding]:
    """What the run did between steps: all ranks wait for logging and checkpoints, and share the evaluation."""
    summary = evidence.summary
    names = {"evaluation": "eval_seconds", "logging": "logging_seconds", "checkpoints": "checkpoint_seconds"}
    seconds = {name: float(summary.get(key) or 0.0) for name, key in names.items()}
    whole = float(summary.get("train_seconds") or 0.0) + sum(seconds.values())
    share = sum(seconds.values()) / whole if whole else 0.0
    if share < OUTSIDE:
        return
    largest = max(seconds, key=lambda name: seconds[name])
    advice = {
        "evaluation": "test_limit=… while you try things out, or fewer and longer epochs",
        "logging": "put the runs on a faster disk (--runs)",
        "checkpoints": "--checkpoint-every with a larger number",
    }
    yield Finding(
        verdict=f"{percent(share)} of the run is outside of steps, most of it {largest}",
        why=", ".join(f"{name} {duration(value)}" for name, value in seconds.items()) + f" of {duration(whole)}",
        next=advice[largest],
        cost=share,
        figures={"outside_s": seconds, "run_s": whole},
    )
