"""The metrics, in one table. Nothing else says what a figure of a run is called, in which unit it is written, which way is better, or
how it comes about: studies, explain, reports, the dashboard's pages, the terminal and exports read it here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lockstep import task, units
from lockstep.measure.view import RunView
from lockstep.recipe import Recipe

Kind = Literal["time", "accuracy", "loss", "rate", "size", "measure"]
Better = Literal["less", "more"]
BETTER: dict[Kind, Better] = {
    "time": "less", "rate": "more", "accuracy": "more", "loss": "less", "size": "less", "measure": "less"
}  # fmt: skip
"""Of a measure of the user's own it is not known: it is sorted as a loss is, and a comparison says higher and lower."""


@dataclass(frozen=True)
class Figure:
    """How a figure is named and written. Values are in base units: seconds, bytes, shares of 1."""

    label: str
    """`{target}` stands for the target accuracy."""
    kind: Kind
    unit: str
    """A unit of `lockstep.units`."""
    short: str = ""
    """The heading of a column where there are many; the label, where it is not stated."""

    @property
    def better(self) -> Better:
        return BETTER[self.kind]

    @property
    def by_ratio(self) -> bool:
        """Times, rates, sizes, losses and measures of the user's own are compared by their ratio, accuracies by their difference."""
        return self.kind != "accuracy"

    @property
    def learned(self) -> bool:
        """Whether it comes from a training, and not from a clock."""
        return self.kind in ("accuracy", "loss", "measure")

    @property
    def timed(self) -> bool:
        """Whether it comes from a clock, so that other work on the machine changes it."""
        return self.kind == "rate" or self.unit == "seconds"

    @property
    def of_placement(self) -> bool:
        """Times, rates and sizes belong to the placement, what is learned to the recipe. A time to an accuracy belongs to both."""
        return not self.learned and "{target}" not in self.label

    @property
    def heading(self) -> str:
        return self.short or self.label

    def title(self, target: float | None) -> str:
        return self.label.format(target="the target" if target is None else f"{target:.1%}")

    def text(
        self, value: float | None, low: float | None = None, high: float | None = None, n: int | None = None
    ) -> str:
        """10.2 s (9.98–10.4)."""
        return units.span(value, low, high, self.unit, n)

    def effect(self, effect: float | None, low: float | None, high: float | None, n: int | None = None) -> str:
        """0.625× (0.601–0.648), or +0.31 points (−0.12 to +0.74)."""
        if effect is None:
            return ""
        return (units.ratio if self.by_ratio else units.points)(effect, low, high, n)


# What the records of a run hold, by the name that it has in summary.json, in epochs.jsonl and in the list of runs.
RECORDED: dict[str, Figure] = {
    "train_loss": Figure("train loss", "loss", "number"),
    "train_accuracy": Figure("train accuracy", "accuracy", "percent", "train acc"),
    "test_loss": Figure("test loss", "loss", "number"),
    "test_accuracy": Figure("test accuracy", "accuracy", "percent", "test acc"),
    "test_top5": Figure("test top-5 accuracy", "accuracy", "percent", "test top5"),
    "test_mae": Figure("test mean absolute error", "loss", "number", "test mae"),
    "test_perplexity": Figure("test perplexity", "loss", "number", "test ppl"),
    "train_seconds": Figure("training time", "time", "seconds", "training"),
    "train_cpu_seconds": Figure("CPU time", "time", "seconds"),
    "eval_seconds": Figure("evaluation time", "time", "seconds", "evaluation"),
    "images_per_second": Figure("samples per second", "rate", "number", "samples/s"),
}


def recorded(key: str) -> Figure:
    """The figure of a record's key; that of a metric of the user's own, which is not in the table, is a plain number."""
    return RECORDED.get(key) or Figure(key.replace("_", " "), "measure", "number")


def learned_keys(recipe: Recipe) -> list[str]:
    """What the records of a recipe's training hold of what it learned: losses, then what else its model is judged by, the first one first."""
    judged = [f"test_{measure.name}" for measure in task.measures(recipe)]
    return ["train_loss", *(["train_accuracy"] if recipe.loss == "cross-entropy" else []), "test_loss", *judged]


Of = Callable[[RunView, float | None], float | None]


@dataclass(frozen=True, kw_only=True)
class Metric(Figure):
    """What a finished run is judged by."""

    of: Of
    """The value of one run, given the target accuracy; None where the run does not have it, infinity for a time that it never reached."""
    usual: bool = False
    """Shown where a study does not choose its metrics."""


def _result(run: RunView, key: str) -> float | None:
    number = (run.summary() or {}).get(key)
    return None if number is None else float(number)


def _recorded(key: str, usual: bool = False) -> Metric:
    """A figure that the run's own summary has."""
    figure = RECORDED[key]
    return Metric(
        figure.label, figure.kind, figure.unit, figure.short, of=lambda run, target: _result(run, key), usual=usual
    )


def _deployed_accuracy(run: RunView, target: float | None) -> float | None:
    """Of the int8 model, where the run made one."""
    return _result(run, "int8_accuracy" if "int8_accuracy" in (run.summary() or {}) else "test_accuracy")


def _memory(run: RunView, target: float | None) -> float | None:
    """Of all ranks together: what the job needs of its host."""
    growths = (run.summary() or {}).get("memory_growth_bytes") or [None]
    return None if None in growths else float(sum(growths))


def memory_of_a_rank(summary: Mapping[str, Any]) -> int | None:
    """Of the rank that needed most, among those that are known."""
    known = [growth for growth in summary.get("memory_growth_bytes") or [] if growth is not None]
    return max(known, default=None)


def _phase(name: str) -> Of:
    """Seconds of a phase over all steps, the mean of the ranks."""

    def seconds(run: RunView, target: float | None) -> float | None:
        phases = run.phases()
        steps = _result(run, "steps")  # of a run that went on from another one, all of them
        return phases["mean_ns"][name] / 1e9 * steps if phases and steps is not None else None

    return seconds


def _core_seconds(run: RunView, target: float | None) -> float | None:
    seconds = _result(run, "train_seconds")
    return None if seconds is None else run.cores * seconds


def epochs_to(epochs: Sequence[Mapping[str, Any]], target: float | None) -> float | None:
    """How many epochs it took to the target accuracy: infinite where it never got there, None where nothing was tested."""
    tested = [epoch.get("test_accuracy") for epoch in epochs]
    if target is None or all(accuracy is None for accuracy in tested):
        return None
    return next((n for n, accuracy in enumerate(tested, 1) if accuracy is not None and accuracy >= target), math.inf)


def _seconds_to_target(run: RunView, target: float | None) -> float | None:
    """Infinite where the run was tested and never got there: it took longer than any run that did."""
    epochs = run.epochs()
    if target is None or all(epoch.get("test_accuracy") is None for epoch in epochs):
        return None
    reached = seconds_to(epochs, target)
    return math.inf if reached is None else reached


def _cost_to_target(run: RunView, target: float | None) -> float | None:
    reached = _seconds_to_target(run, target)
    return None if reached is None else run.cores * reached


# By the names that a study's file takes.
METRICS: dict[str, Metric] = {
    "seconds": _recorded("train_seconds", usual=True),
    "images_per_second": _recorded("images_per_second", usual=True),
    "accuracy": _recorded("test_accuracy", usual=True),
    "memory": Metric("memory of all ranks", "size", "bytes", of=_memory, usual=True),
    "deployed_accuracy": Metric("accuracy as deployed", "accuracy", "percent", of=_deployed_accuracy),
    "cpu_seconds": _recorded("train_cpu_seconds"),
    "forward_seconds": Metric("forward", "time", "seconds", of=_phase("forward")),
    "backward_seconds": Metric("backward", "time", "seconds", of=_phase("backward")),
    "core_seconds": Metric("core-seconds", "size", "seconds", of=_core_seconds),
    "seconds_to_target": Metric("time to {target}", "time", "seconds", of=_seconds_to_target),
    "cost_to_target": Metric("core-seconds to {target}", "size", "seconds", of=_cost_to_target),
    "memory_of_a_rank": Metric(
        "memory of a rank", "size", "bytes", of=lambda run, target: memory_of_a_rank(run.summary() or {})
    ),
    # Counted in a race alone: it takes a profiler, which slows a run down.
    "tensor_memory": Metric("memory of tensors", "size", "bytes", of=lambda run, target: None),
    "loss": _recorded("test_loss"),
    "top5": _recorded("test_top5"),
    "mae": _recorded("test_mae"),
    "perplexity": _recorded("test_perplexity"),
}
USUAL = tuple(name for name, metric in METRICS.items() if metric.usual)


def metric_of(name: str) -> Metric:
    """The metric of a name: one of the table, or a measure of the user's own, which is what its records say."""
    found = METRICS.get(name)
    if found is not None:
        return found
    figure = recorded(f"test_{name}")
    return Metric(
        figure.label, figure.kind, figure.unit, figure.short, of=lambda run, target: _result(run, f"test_{name}")
    )


def known_metrics(recipes: Iterable[Recipe]) -> list[str]:
    """All names that a study of these recipes may have among its metrics."""
    own = [measure.name for recipe in recipes for measure in task.measures(recipe) if measure.own]
    return list(dict.fromkeys([*METRICS, *own]))


def main_metric(recipe: Recipe) -> str:
    """What a recipe's model is judged by."""
    return task.main_measure(recipe)


def fitting(metrics: Iterable[str], recipes: Iterable[Recipe]) -> list[str]:
    """The same metrics for tasks that have no accuracy: what their models are judged by stands in its place."""
    chosen = list(recipes)
    if not chosen or any("accuracy" in [measure.name for measure in task.measures(recipe)] for recipe in chosen):
        return list(metrics)
    return list(dict.fromkeys(main_metric(chosen[0]) if name == "accuracy" else name for name in metrics))


def value(run: RunView, metric: str, target: float | None) -> float | None:
    """One figure of one run; None where the run does not have it."""
    return metric_of(metric).of(run, target)


def seconds_to(epochs: Sequence[Mapping[str, Any]], target: float | None) -> float | None:
    """Seconds of training until the first epoch that ended with the target accuracy; None where none did."""
    spent: float = 0.0
    for epoch in epochs:
        spent += float(epoch.get("train_seconds") or 0.0)
        reached = epoch.get("test_accuracy")
        if target is not None and reached is not None and reached >= target:
            return spent
    return None


def common_target(runs: Iterable[RunView]) -> float | None:
    """The accuracy that every one of them reached at some time, rounded down to a tenth of a point."""
    curves = [[epoch.get("test_accuracy") for epoch in run.epochs()] for run in runs]
    # A loop of the user's own need not test.
    best = [max(values) for curve in curves if (values := [value for value in curve if value is not None])]
    return int(min(best) * 1000) / 1000 if best else None
