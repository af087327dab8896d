"""The figures that labs ask for, each computed from the records of every step; a test accuracy is that of the run's weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.measure import phases
from lockstep.run import Run

Rows = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Measured:
    """What a run's own records hold: the steps of every rank, and the test of its weights."""

    rows: Sequence[Rows]
    test_accuracy: float | None
    """The share of test samples that are right: as recorded."""
    weights_bytes: int = 0

    @classmethod
    def of(cls, run: Run, rows: Sequence[Rows], test_accuracy: float | None) -> Measured:
        """With the size of the run's weights."""
        weights = run.folder / "model.pt"
        return cls(rows, test_accuracy, weights.stat().st_size if weights.is_file() else 0)


@dataclass(frozen=True)
class Figure:
    label: str
    unit: str
    of: Callable[[Measured], float]


def _timed(run: Measured) -> list[Rows]:
    """The steps after warm-up that all ranks have."""
    return phases.common([phases.after_warmup(rows) for rows in run.rows])


def _seconds(run: Measured) -> Rows:
    """Of every step: as long as its slowest rank took."""
    return np.asarray(np.max([rows["total_ns"] for rows in _timed(run)], axis=0) / 1e9)


def _step_ms(run: Measured) -> float:
    return float(np.median(_seconds(run)) * 1e3)


def _images_per_second(run: Measured) -> float:
    samples = np.sum([rows["samples"] for rows in _timed(run)])
    return float(samples / _seconds(run).sum())


def _exchange_share(run: Measured) -> float:
    timed = _timed(run)
    return float(100 * np.mean([rows["exchange_ns"].sum() / rows["total_ns"].sum() for rows in timed]))


def _last_epoch(run: Measured, column: str) -> float:
    last = max(int(rows["epoch"].max()) for rows in run.rows)
    ours = [rows[rows["epoch"] == last] for rows in run.rows]
    return float(sum(rows[column].sum() for rows in ours) / sum(rows["samples"].sum() for rows in ours))


def _test_accuracy(run: Measured) -> float:
    if run.test_accuracy is None:
        raise ValueError("its weights were not tested")
    return 100 * run.test_accuracy


FIGURES = {
    "images_per_second": Figure("images per second", "images/s", _images_per_second),
    "step_ms": Figure("median step", "ms", _step_ms),
    "exchange_share": Figure("exposed exchange, of a step", "%", _exchange_share),
    "train_loss": Figure("train loss of the last epoch", "", lambda run: _last_epoch(run, "loss_sum")),
    "train_accuracy": Figure("train accuracy of the last epoch", "%", lambda run: 100 * _last_epoch(run, "correct")),
    "test_accuracy": Figure("test accuracy", "%", _test_accuracy),
    "gap": Figure(
        "train accuracy less test accuracy",
        "points",
        lambda run: 100 * _last_epoch(run, "correct") - _test_accuracy(run),
    ),
    "steps": Figure("steps", "steps", lambda run: float(len(run.rows[0]))),
    "weights_kb": Figure("size of model.pt", "kB", lambda run: run.weights_bytes / 1e3),
}


def value(figure: str, of: Measured, over: Measured | None = None, minus: Measured | None = None) -> float:
    """ValueError where the records do not hold it."""
    found = FIGURES[figure].of(of)
    if over is not None:
        return found / FIGURES[figure].of(over)
    return found - FIGURES[figure].of(minus) if minus is not None else found


def shown(number: float, unit: str) -> str:
    text = f"{number:,.4g}" if abs(number) < 1000 else f"{number:,.0f}"
    return f"{text} {unit}".strip()
