"""Step records while they are written: the loss in a few hundred stretches, and where a step goes, however many steps there are.

The files are read on from where the last look ended, a few megabytes at a time, and only what all ranks have written counts: a row of a
step is merged over its ranks, never by the order in which they arrive.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from lockstep.dashboard.security import read_at
from lockstep.explain.step import NAMES, waiting
from lockstep.measure.records import PHASES, ROW
from lockstep.report.phases import MOST_RANKS, bars
from lockstep.report.views import Axis, Bar, Bars, Lines, Numbers, Series, shorts, sure
from lockstep.run import Run

Rows = np.ndarray[Any, Any]
# Stretches are merged two by two when there are twice as many.
STRETCHES = 300
READ_BYTES = 8 << 20
# What one look reads at most: a run of a million steps is caught up with in a few of them.
LOOK_BYTES = 64 << 20
FEW_ROWS = 256
# Of a row, what is known of it for ever once it is written.
_HEAD_BYTES = np.dtype(ROW.descr[:6]).itemsize


class StepFiles:
    """The step records of all ranks, read on together."""

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
        """Whether rows that were read are others now: ranks that were restarted write them anew."""
        return bool(self._at) and self._last != [self._row(path, self._at - 1) for path in self._paths]

    def more(self) -> list[Rows]:
        """The next rows that every rank has, the same steps of each; empty where there are none."""
        found = [self._rows(path) for path in self._paths]
        length = min(len(rows) for rows in found)
        # Small reads while there is little: the rest of the file is reserved, and empty.
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
            # Losses come from the device later than the rows: those at the end that are not there yet are waited for.
            written &= np.flip(np.logical_or.accumulate(np.flip(rows["loss_sum"] != 0)))
        empty = np.flatnonzero(~written)
        return rows[: int(empty[0])] if len(empty) else rows

    def _row(self, path: Path, number: int) -> bytes:
        return read_at(self._root, path, number * ROW.itemsize, _HEAD_BYTES) or b""


class Stretches:
    """The mean, the least and the most of the loss in stretches of equal length."""

    def __init__(self) -> None:
        self.width, self.count, self.first = 1, 0, 0
        self._sum, self._low, self._high = (np.zeros(2 * STRETCHES) for _ in range(3))

    def add(self, first_step: int, losses: Rows) -> None:
        if not self.count:
            self.first = first_step
        while self.count + len(losses) > 2 * STRETCHES * self.width:
            self._merge()
        place = (self.count + np.arange(len(losses))) // self.width
        begin = np.flatnonzero(np.diff(place, prepend=-1))
        where = place[begin]
        old = where < -(-self.count // self.width)  # a stretch that was begun before
        low, high = np.minimum.reduceat(losses, begin), np.maximum.reduceat(losses, begin)
        self._low[where] = np.where(old, np.minimum(self._low[where], low), low)
        self._high[where] = np.where(old, np.maximum(self._high[where], high), high)
        self._sum[where] = np.where(old, self._sum[where], 0.0) + np.add.reduceat(losses, begin)
        self.count += len(losses)

    def _merge(self) -> None:
        """Two by two; what is beyond the rows so far counts for nothing."""
        used = -(-self.count // self.width)
        if used % 2:
            self._sum[used], self._low[used], self._high[used] = 0.0, self._low[used - 1], self._high[used - 1]
        for values, join in ((self._sum, np.add), (self._low, np.minimum), (self._high, np.maximum)):
            values[:STRETCHES] = join(values[0::2], values[1::2])
            values[STRETCHES:] = 0.0
        self.width *= 2

    def series(self) -> Series:
        used = -(-self.count // self.width)
        lengths = np.full(used, self.width)
        lengths[-1] = self.count - (used - 1) * self.width
        middle = self.first + np.arange(used) * self.width + lengths // 2
        band = self.width > 1
        low: Numbers = shorts(self._low[:used].tolist()) if band else []
        high: Numbers = shorts(self._high[:used].tolist()) if band else []
        mean = shorts((self._sum[:used] / lengths).tolist())
        return Series(name="loss", colour="c0", x=middle.tolist(), y=mean, low=low, high=high)


class Breakdown:
    """Sums of the phases of each rank's steps, those of warm-up apart."""

    def __init__(self, ranks: int) -> None:
        self._parts = np.zeros((2, ranks, len(NAMES)))
        self._steps = np.zeros(2, dtype=int)

    def add(self, ranks: list[Rows]) -> None:
        waited = waiting(ranks)
        for warm in (0, 1):
            chosen = ranks[0]["warmup"] == warm
            if not chosen.any():
                continue
            self._steps[warm] += int(chosen.sum())
            for rank, rows in enumerate(ranks):
                seconds = {phase: float(rows[f"{phase}_ns"][chosen].sum()) / 1e9 for phase in PHASES}
                other = float(rows["total_ns"][chosen].sum()) / 1e9 - sum(seconds.values())
                wait = float(waited[rank][chosen].sum())
                parts = {**seconds, "exchange": seconds["exchange"] - wait, "waiting": wait, "other": other}
                self._parts[warm, rank] += [parts[name] for name in NAMES]

    def means(self) -> Rows | None:
        """Seconds of each part by rank: of steps after warm-up, where there are some."""
        warm = 0 if self._steps[0] else 1
        return self._parts[warm] / self._steps[warm] if self._steps[warm] else None


class LiveSteps:
    """Both plots of the steps of one run."""

    def __init__(self, root: Path, run: Run, ranks: int, on_gpu: bool) -> None:
        self._files, self._ranks = StepFiles(root, run, ranks, on_gpu), ranks
        self._clear()

    def _clear(self) -> None:
        self._loss, self._breakdown, self._has_loss = Stretches(), Breakdown(self._ranks), False

    def look(self) -> bool:
        """Read on, as much as one look may; whether anything is new."""
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
        samples = np.sum([rows["samples"] for rows in ranks], axis=0)
        loss = np.sum([rows["loss_sum"] for rows in ranks], axis=0) / np.maximum(samples, 1)
        self._has_loss |= bool(samples.any() and np.isfinite(loss).any())
        self._loss.add(int(ranks[0]["step"][0]), loss)
        self._breakdown.add(ranks)

    def charts(self) -> list[Lines | Bars]:
        return [chart for chart in (self._lines(), self._bars()) if chart is not None]

    def _lines(self) -> Lines | None:
        if not self._loss.count or not self._has_loss:
            return None
        width = self._loss.width
        return Lines(
            id="loss-by-step",
            section="learning",
            title="Training loss, step by step",
            says="Mean over all ranks' samples of each step."
            + (f" Each point is the mean of {width:,} steps, the band their least and most." if width > 1 else ""),
            x=Axis(label="step", unit="count"),
            y=Axis(label="training loss"),
            series=[self._loss.series()],
        )

    def _bars(self) -> Bars | None:
        means = self._breakdown.means()
        if means is None:
            return None
        rows = [_bar("all ranks, mean", means.mean(axis=0))]
        if self._ranks > 1:
            rows += [_bar(f"rank {rank}", means[rank]) for rank in range(min(self._ranks, MOST_RANKS))]
        return bars(rows)


def _bar(name: str, seconds: Rows) -> Bar:
    return Bar(name=name, values=[sure(max(0.0, float(value))) for value in seconds])
