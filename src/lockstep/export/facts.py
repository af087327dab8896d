"""A run as other trackers need it: settings, curves, results, and its study."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.export.tables import cells
from lockstep.measure.view import view
from lockstep.metrics import memory_of_a_rank
from lockstep.run import ENDED, Run
from lockstep.settings import dotted, flatten

# These identify a record and are not measured.
_PLACES = ("epoch", "step", "time")
LOGGED = "logged/"
"""Before the names that an attached script has logged values under."""


@dataclass(frozen=True)
class Chosen:
    """A run to export; the study and the cell that it is a repeat of, where it was found through its study."""

    run: Run
    study: str | None = None
    cell: str | None = None


@dataclass(frozen=True)
class Point:
    """Measurements at one point of a run."""

    epoch: int
    step: int
    at: float
    values: dict[str, float]


@dataclass(frozen=True)
class Facts:
    """One run, as every tracker sees a run."""

    id: str
    state: str
    settings: dict[str, bool | float | str]
    """By key, as in key=value; unset settings are left out."""
    curve: list[Point]
    """One point per epoch, over all ranks; of an attached script, one per step at which it logged."""
    final: Point
    labels: dict[str, str]
    started: float
    ended: float | None


def facts(chosen: Chosen) -> Facts:
    """Read from the run's folder, whether the run has ended or is still running."""
    run = chosen.run
    spec, status, environment = run.spec(), run.status(), run.environment()
    ended = float(status["since"]) if status["state"] in ENDED and status.get("since") is not None else None
    curve = [_point(record, spec.created) for record in run.epochs()] or _logged(run)
    summary = flatten(run.summary() or {})
    last = curve[-1] if curve else Point(0, 0, spec.created, {})
    most = memory_of_a_rank(summary)
    summary = {**summary, "memory_growth_bytes": most}
    labels = {
        "state": status["state"],
        "cause": status.get("cause"),
        "study": chosen.study or (spec.part and spec.part.study),
        "cell": chosen.cell or (spec.part and spec.part.cell),
        "cpu": environment.get("cpu"),
        "torch": environment.get("torch"),
        "lockstep": spec.lockstep,
        "data_origin": spec.data_origin,
        **{key: value for key, value in summary.items() if isinstance(value, str | bool)},
    }
    return Facts(
        id=run.id,
        state=status["state"],
        settings={key: one for key, one in cells(dotted(*spec.known())).items() if one not in (None, "")},
        curve=curve,
        final=Point(last.epoch, last.step, ended or last.at, _numbers(summary)),
        labels={key: str(value) for key, value in labels.items() if value not in (None, "")},
        started=spec.created,
        ended=ended,
    )


def _point(record: Mapping[str, Any], created: float) -> Point:
    values = {key: value for key, value in _numbers(record).items() if key not in _PLACES}
    step, at = record.get("step"), record.get("time")
    return Point(record["epoch"], record["epoch"] if step is None else step, created if at is None else at, values)


def _logged(run: Run) -> list[Point]:
    """What an attached script has logged, by step."""
    points: dict[int, Point] = {}
    for each in view(run).logged():
        for step, at, value in zip(each.steps, each.times, each.values, strict=True):
            points.setdefault(step, Point(step, step, at, {})).values[LOGGED + each.name] = value
    return [points[step] for step in sorted(points)]


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    return {
        key: float(value)
        for key, value in record.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
