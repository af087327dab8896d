"""What a finished run is judged by: its own figures, and those that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.run import Run, Spec
from lockstep.study.statistics import Kind


@dataclass(frozen=True)
class Metric:
    """One column: what it is called, which way is good, how it is written."""

    label: str
    kind: Kind
    form: str


METRICS = {
    "seconds": Metric("train s", "time", "{:.3g}"),
    "images_per_second": Metric("images/s", "rate", "{:,.0f}"),
    "accuracy": Metric("test accuracy", "accuracy", "{:.2%}"),
    "memory": Metric("memory MB", "size", "{:.0f}"),
    "deployed_accuracy": Metric("accuracy as deployed", "accuracy", "{:.2%}"),
    "cpu_seconds": Metric("CPU s", "time", "{:.3g}"),
    "core_seconds": Metric("core-s", "size", "{:.3g}"),
    "seconds_to_target": Metric("s to target", "time", "{:.3g}"),
    "cost_to_target": Metric("core-s to target", "size", "{:.3g}"),
}


@dataclass
class Sample:
    """One run of a cell. `pair` says with which run of another cell it is compared: the one of the same block."""

    pair: Any
    run: Run
    spec: Spec
    state: str
    cause: str = ""
    summary: dict[str, Any] = field(default_factory=dict)
    epochs: list[dict[str, Any]] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def seed(self) -> int:
        return self.spec.recipe.seed

    @property
    def cores(self) -> int:
        return self.spec.placement.ranks * (self.spec.placement.threads or 1)


def sample(run: Run, pair: Any) -> Sample:
    """Everything of a run that a comparison reads."""
    status = run.status()
    found = Sample(pair, run, run.spec(), status["state"], str(status.get("cause") or ""))
    if found.state == "done":
        found.summary, found.epochs, found.environment = run.summary() or {}, run.epochs(), run.environment()
    return found


def value(found: Sample, metric: str, target: float | None) -> float | None:
    """One figure of one run; None where the run does not have it."""
    summary = found.summary
    if metric == "memory":
        # Of all ranks together: what the job needs of its host.
        known = summary.get("memory_growth_bytes") or [None]
        return None if None in known else sum(known) / 1e6
    if metric == "core_seconds":
        return found.cores * summary["train_seconds"] if "train_seconds" in summary else None
    if metric in ("seconds_to_target", "cost_to_target"):
        reached = seconds_to(found.epochs, target)
        return reached if reached is None or metric == "seconds_to_target" else reached * found.cores
    if metric == "deployed_accuracy":  # of the int8 model, where there is one
        number = summary.get("int8_accuracy", summary.get("test_accuracy"))
        return None if number is None else float(number)
    keys = {"seconds": "train_seconds", "accuracy": "test_accuracy", "cpu_seconds": "train_cpu_seconds"}
    number = summary.get(keys.get(metric, metric))
    return None if number is None else float(number)


def seconds_to(epochs: Sequence[dict[str, Any]], target: float | None) -> float | None:
    """Seconds of training until the first epoch that ended with the target accuracy; None where none did."""
    spent: float = 0.0
    for epoch in epochs:
        spent += float(epoch["train_seconds"])
        if target is not None and epoch["test_accuracy"] is not None and epoch["test_accuracy"] >= target:
            return spent
    return None


def common_target(cells: Sequence[Sequence[Sample]]) -> float | None:
    """The accuracy that every finished run reached at some time, rounded down to a tenth of a point."""
    curves = [[e["test_accuracy"] for e in found.epochs] for cell in cells for found in cell]
    # A loop of the user's own need not test.
    best = [max(values) for curve in curves if (values := [value for value in curve if value is not None])]
    return int(min(best) * 1000) / 1000 if best else None
