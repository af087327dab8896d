"""Step records while they are written: the loss of every step, and where a step goes, for any number of steps.

Each update continues reading where the last one ended, a few megabytes at a time. Only steps that all ranks have written count: a step
is merged over its ranks, never in the order in which they arrive.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lockstep.dashboard.security import read_at
from lockstep.measure.phases import NAMES, Rows, split
from lockstep.measure.records import ROW, mean_losses
from lockstep.plan import Plan
from lockstep.report import along
from lockstep.report.curves import step_chart, step_series
from lockstep.report.pace import rate_chart, rate_series
from lockstep.report.steps import run_bars
from lockstep.report.subject import Colour
from lockstep.report.views import Bars, Lines
from lockstep.run import Run

READ_BYTES = 8 << 20
# The most that one update reads: a run of a million steps is caught up with in a few updates.
LOOK_BYTES = 64 << 20
FEW_ROWS = 256
# Fields of a row that never change once it is written.
_HEAD_BYTES = np.dtype(ROW.descr[:6]).itemsize


class StepFiles:
    """The step records of all ranks, read together."""

    def __init__(self, root: Path, run: Run, ranks: int, on_gpu: bool) -> None:
        self._root, self._on_gpu = root, on_gpu
        self._paths = [run.rank_folder(rank) / "steps.bin" for rank in range(ranks)]
        self._most = max(FEW_ROWS, READ_BYTES // (ROW.itemsize * max(1, ranks)))
        self.start_over()

    def start_over(self) -> None:
        self._at = 0
        self._few = FEW_ROWS
        self._last: list[bytes] = []

    def cut(self) -> bool:
        """Whether rows that were read have changed: restarted ranks overwrite them."""
        return bool(self._at) and self._last != [self._row(path, self._at - 1) for path in self._paths]

    def more(self) -> list[Rows]:
        """The next rows that every rank has, the same steps of each; empty where there are none."""
        found = [self._rows(path) for path in self._paths]
        length = min(len(rows) for rows in found)
        # Small reads at first: the rest of the file is reserved, and empty.
        self._few = min(self._most, self._few * 8) if length == self._few else FEW_ROWS
        steps = found[0]["step"][:length]
        for rows in found[1:]:
            other = np.flatnonzero(rows["step"][:length] != steps)
            if len(other):
                length = min(length, int(other[0]))
        if not length:
            return []
        self._at += length
        self._last = [rows[length - 1].tobytes()[:_HEAD_BYTES] for rows in found]
        return [rows[:length] for rows in found]

    def _rows(self, path: Path) -> Rows:
        data = read_at(self._root, path, self._at * ROW.itemsize, self._few * ROW.itemsize) or b""
        rows = np.frombuffer(data[: len(data) - len(data) % ROW.itemsize], dtype=ROW)
        written = rows["step"] > 0
        if self._on_gpu:
            # Losses arrive from the device later than the rows: missing ones at the end are read next time.
            written &= np.flip(np.logical_or.accumulate(np.flip(rows["loss_sum"] != 0)))
        empty = np.flatnonzero(~written)
        return rows[: int(empty[0])] if len(empty) else rows

    def _row(self, path: Path, number: int) -> bytes:
        return read_at(self._root, path, number * ROW.itemsize, _HEAD_BYTES) or b""


class LiveSteps:
    """The plots of the steps of one run, from the losses, samples and seconds of all steps and the sums of their phases."""

    def __init__(self, root: Path, run: Run, plan: Plan, on_gpu: bool) -> None:
        self._files, self._plan, self._ranks = StepFiles(root, run, plan.ranks, on_gpu), plan, plan.ranks
        self._clear()

    def _clear(self) -> None:
        self._losses: list[Rows] = []
        self._samples: list[Rows] = []
        self._took: list[Rows] = []
        self._last = np.empty(0, dtype=ROW)
        self._first_step = 0
        # Of the steps after warm-up, and of warm-up: how many, and the seconds of each rank's phases.
        self._steps, self._seconds = [0, 0], np.zeros((2, self._ranks, len(NAMES)))

    def look(self) -> bool:
        """Read at most one update's worth; returns whether anything is new."""
        new = self._files.cut()
        if new:
            self._files.start_over()
            self._clear()
        read = 0
        while read < LOOK_BYTES and (ranks := self._files.more()):
            self._add(ranks)
            read += len(ranks[0]) * ROW.itemsize * self._ranks
        return new or read > 0

    def _add(self, ranks: list[Rows]) -> None:
        if not self._losses:
            self._first_step = int(ranks[0]["step"][0])
        self._losses.append(mean_losses(ranks))
        samples = np.sum([rows["samples"] for rows in ranks], axis=0)
        self._samples.append((samples if samples.any() else samples + self._plan.global_batch).astype(np.float32))
        joined = np.concatenate([self._last, ranks[0]])
        self._took.append(along.seconds_of(joined)[len(self._last) :])
        self._last = ranks[0][-1:].copy()
        for warmup in (0, 1):
            chosen = ranks[0]["warmup"] == warmup
            count = int(chosen.sum())
            if count:
                self._steps[warmup] += count
                parts = split([rows[chosen] for rows in ranks])
                self._seconds[warmup] += [[count * part[name] for name in NAMES] for part in parts]

    def charts(self) -> list[Lines | Bars]:
        if not self._losses:
            return []
        losses, samples, took = (np.concatenate(each) for each in (self._losses, self._samples, self._took))
        steps = self._first_step + np.arange(len(losses))
        way = along.of_steps(steps, samples.astype(float), took, self._plan.steps_per_epoch)
        line, rate = (
            step_series(way, losses, "loss", "c0"),
            rate_series(way, "rate", Colour("c0", False), len(way.samples) > 0),
        )
        warmup = 0 if self._steps[0] else 1
        means = self._seconds[warmup] / self._steps[warmup]
        bars = run_bars([dict(zip(NAMES, rank, strict=True)) for rank in means.tolist()])
        lines = [step_chart([line]) if line else None, rate_chart([rate], len(way.samples) > 0) if rate else None]
        return [chart for chart in (*lines, bars) if chart]
