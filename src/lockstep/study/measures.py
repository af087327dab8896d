"""The metrics: what a finished run is judged by, in one table. Studies, reports, dashboard and terminal read it, and nothing else says what a
metric is called, in which unit it is, which way is good, or how it comes about."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.run import Run, Spec
from lockstep.study.statistics import Kind


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


def seconds_to(epochs: Sequence[dict[str, Any]], target: float | None) -> float | None:
    """Seconds of training until the first epoch that ended with the target accuracy; None where none did."""
    spent: float = 0.0
    for epoch in epochs:
        spent += float(epoch.get("train_seconds") or 0.0)
        reached = epoch.get("test_accuracy")
        if target is not None and reached is not None and reached >= target:
            return spent
    return None


def common_target(cells: Sequence[Sequence[Sample]]) -> float | None:
    """The accuracy that every finished run reached at some time, rounded down to a tenth of a point."""
    curves = [[e.get("test_accuracy") for e in found.epochs] for cell in cells for found in cell]
    # A loop of the user's own need not test.
    best = [max(values) for curve in curves if (values := [value for value in curve if value is not None])]
    return int(min(best) * 1000) / 1000 if best else None


@dataclass(frozen=True)
class Metric:
    """One figure of a run. Values are in base units: seconds, bytes, shares of 1."""

    label: str
    """`{target}` stands for the target accuracy."""
    kind: Kind
    """Says how two values are compared, and which way is better."""
    unit: str
    """How it is written: a unit of report/units.py."""
    of: Callable[[Sample, float | None], float | None]
    """The value of one run, given the target accuracy; None where the run does not have it, infinity for a time that it never reached."""
    usual: bool = False
    """Shown where a study does not choose its metrics."""

    def title(self, target: float | None) -> str:
        return self.label.format(target="the target" if target is None else f"{target:.1%}")


def _summary(key: str) -> Callable[[Sample, float | None], float | None]:
    """A figure that the run's own summary has."""

    def of(found: Sample, target: float | None) -> float | None:
        number = found.summary.get(key)
        return None if number is None else float(number)

    return of


def _deployed_accuracy(found: Sample, target: float | None) -> float | None:
    """Of the int8 model, where the run made one."""
    number = found.summary.get("int8_accuracy", found.summary.get("test_accuracy"))
    return None if number is None else float(number)


def _memory(found: Sample, target: float | None) -> float | None:
    """Of all ranks together: what the job needs of its host."""
    growths = found.summary.get("memory_growth_bytes") or [None]
    return None if None in growths else float(sum(growths))


def _core_seconds(found: Sample, target: float | None) -> float | None:
    seconds = found.summary.get("train_seconds")
    return None if seconds is None else found.cores * float(seconds)


def _seconds_to_target(found: Sample, target: float | None) -> float | None:
    """Infinite where the run was tested and never got there: it took longer than any run that did."""
    tested = any(epoch.get("test_accuracy") is not None for epoch in found.epochs)
    if target is None or not tested:
        return None
    reached = seconds_to(found.epochs, target)
    return math.inf if reached is None else reached


def _cost_to_target(found: Sample, target: float | None) -> float | None:
    reached = _seconds_to_target(found, target)
    return None if reached is None else found.cores * reached


METRICS = {
    "seconds": Metric("training time", "time", "seconds", _summary("train_seconds"), usual=True),
    "images_per_second": Metric("images per second", "rate", "number", _summary("images_per_second"), usual=True),
    "accuracy": Metric("test accuracy", "accuracy", "percent", _summary("test_accuracy"), usual=True),
    "memory": Metric("memory of all ranks", "size", "bytes", _memory, usual=True),
    "deployed_accuracy": Metric("accuracy as deployed", "accuracy", "percent", _deployed_accuracy),
    "cpu_seconds": Metric("CPU time", "time", "seconds", _summary("train_cpu_seconds")),
    "core_seconds": Metric("core-seconds", "size", "seconds", _core_seconds),
    "seconds_to_target": Metric("time to {target}", "time", "seconds", _seconds_to_target),
    "cost_to_target": Metric("core-seconds to {target}", "size", "seconds", _cost_to_target),
}
USUAL = tuple(name for name, metric in METRICS.items() if metric.usual)


def value(found: Sample, metric: str, target: float | None) -> float | None:
    """One figure of one run; None where the run does not have it."""
    return METRICS[metric].of(found, target)
