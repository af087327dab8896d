"""Where along a training the points of its curves lie: by step, sample, second and epoch. The reader of a curve chooses."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from lockstep.measure.phases import Rows, common
from lockstep.measure.view import RunView
from lockstep.report.views import Axis, Lines, Numbers, short, shorts

STEP, SAMPLES, EPOCH = Axis("step", "count"), Axis("samples", "count"), Axis("epoch", "count")
TIME = Axis("training time", "seconds")
BESIDE_STEPS, BESIDE_EPOCHS = (SAMPLES, TIME, Axis("epochs")), (STEP, SAMPLES, TIME)
Places = Mapping[int, Numbers]
"""By epoch: where it ended, on each axis of BESIDE_EPOCHS."""


class Along(NamedTuple):
    """The end of every step: its number, and the samples, seconds and epochs until then. What is not known is empty."""

    steps: Rows
    samples: Rows
    seconds: Rows
    epochs: Rows

    def at(self, places: Rows) -> list[Numbers]:
        """Of some of the steps, by their place: one list for each axis of BESIDE_STEPS."""
        found = (each[places].tolist() if len(each) else [None] * len(places) for each in self[1:])
        return [shorts(each) for each in found]

    def at_steps(self, steps: Sequence[int]) -> list[Numbers]:
        """The same, of steps by their number; of one beyond the last, of the last."""
        if not len(self.steps):
            return [[None] * len(steps) for _ in BESIDE_STEPS]
        return self.at(np.clip(np.searchsorted(self.steps, steps), 0, len(self.steps) - 1))


def of_run(run: RunView) -> Along:
    """By its step records; its seconds are those of its first rank."""
    ranks = common(run.all_steps())
    batch = run.spec().plan.global_batch
    samples = np.sum([rows["samples"] for rows in ranks], axis=0)
    # An attached command tells its batch, and nothing of each step.
    each = samples if samples.any() else np.full(len(samples), batch)
    return of_steps(ranks[0]["step"], each, seconds_of(ranks[0]), run.spec().plan.steps_per_epoch)


def of_steps(steps: Rows, samples: Rows, seconds: Rows, steps_per_epoch: int) -> Along:
    """From what each step took: its samples, and the seconds from the end of the one before to its own."""
    none = np.empty(0)
    # A run that goes on from another one has what the other has trained before its first step.
    before = (int(steps[0]) - 1) if len(steps) else 0
    epochs = steps / steps_per_epoch if steps_per_epoch else none
    known = len(steps) > 0 and bool(samples.any())
    trained = before * float(np.median(samples)) + np.cumsum(samples) if known else none
    return Along(steps, trained, np.cumsum(seconds), epochs)


def seconds_of(rows: Rows) -> Rows:
    """Seconds from the end of a step to the end of the next. What lies between epochs (tests, checkpoints) is no training, and is left out; so is
    what lies before rows that another process has written, whose clock is another one."""
    if not len(rows):
        return np.empty(0)
    took, ends = rows["total_ns"], rows["start_ns"] + rows["total_ns"]
    apart = np.diff(ends)
    whole = (np.diff(rows["epoch"]) != 0) | (apart < took[1:])
    return np.concatenate([took[:1], np.where(whole, took[1:], apart)]) / 1e9


def of_epochs(runs: Iterable[RunView]) -> dict[int, Numbers]:
    """Where each epoch ended: the mean over runs."""
    found: dict[int, list[list[float | None]]] = {}
    for run in runs:
        samples = seconds = 0.0
        for record in run.epochs():
            samples, seconds = (
                samples + float(record.get("samples") or 0),
                seconds + float(record.get("train_seconds") or 0),
            )
            found.setdefault(int(record["epoch"]), []).append([record.get("step"), samples or None, seconds or None])
    return {epoch: [_mean(axis) for axis in zip(*places, strict=True)] for epoch, places in found.items()}


def _mean(values: Sequence[Any]) -> float | None:
    known = [float(value) for value in values if value is not None]
    return short(statistics.fmean(known)) if known else None


def choices(chart: Lines, axes: Sequence[Axis]) -> Lines:
    """The chart with those of the axes that any line knows its place on; a line that does not is not drawn there."""
    known = [k for k in range(len(axes)) if any(x is not None for one in chart.series if one.over for x in one.over[k])]
    series = [
        replace(one, over=[one.over[k] if one.over else [None] * len(one.x) for k in known]) for one in chart.series
    ]
    marks = [replace(mark, over=[mark.over[k] if mark.over else None for k in known]) for mark in chart.marks]
    return replace(chart, series=series, marks=marks, over=[axes[k] for k in known])
