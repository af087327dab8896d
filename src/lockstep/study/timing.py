"""What the race of a study says of each cell: the time of an image by start, and so of a whole training; an evaluation's time; its memory.

race.json        what raced, where, for how long, and every ratio that was asked for, as of the look that settled it
windows.jsonl    all that was measured
starts.jsonl     of each start of a cell: the time of one evaluation, and its memory

racing.py writes them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from lockstep.plan import Plan
from lockstep.reading import exists, read_records
from lockstep.run import read_struct
from lockstep.shapes import Count, Number
from lockstep.statistics import MARGIN_RATIO
from lockstep.study.folder import StudyFolder
from lockstep.study.plan import Cell, Planned, timed_content
from lockstep.turns import estimate
from lockstep.turns.estimate import Ratio, Window, middle_mean

COUNTED = "tensor_memory"
"""A metric that is counted, not measured: its values need no test."""
STATE, WINDOWS, STARTED = "race.json", "windows.jsonl", "starts.jsonl"


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """One start of one cell, beside its windows."""

    cell: str
    start: int
    evaluation: Number | None = None
    memory: Number | None = None
    memory_of_a_rank: Number | None = None
    tensor_memory: Number | None = None


class State(msgspec.Struct, frozen=True, kw_only=True):
    """A study's race, as far as it has come."""

    cells: str
    """A hash of what raced."""
    own: str = ""
    """A hash of the user's own files in it."""
    machine: dict[str, str] = {}
    baseline: str = ""
    """Whom the others were compared with: the study's baseline, unless it failed."""
    over: bool = False
    seconds: Number = 0.0
    budget: Number = 0.0
    starts: Count = 0
    disturbed: Count = 0
    failures: dict[str, str] = {}
    ratios: list[Ratio] = []
    cpu_ratios: list[Ratio] = []


@dataclass(frozen=True)
class Raced:
    """A study's race, as it was kept."""

    state: State
    windows: list[Window]
    started: list[Started]

    def of(self, cell: Cell) -> CellTime | None:
        windows = [window for window in self.windows if window.contender == cell.name]
        if not windows or cell.plan is None:
            return None
        return CellTime(self, cell, cell.plan, windows, [start for start in self.started if start.cell == cell.name])

    def ratio(self, contender: str, baseline: str, clock: estimate.Clock = "wall") -> Ratio:
        """As the race settled it. What it was not asked for, or has not looked at yet, is not settled, whatever its windows say."""
        for one in self._settled(clock):
            if {one.contender, one.baseline} == {contender, baseline}:
                return one if one.contender == contender else inverse(one)
        (now,) = estimate.ratios(self.windows, [(contender, baseline)], MARGIN_RATIO, clock)
        return msgspec.structs.replace(now, verdict="not settled")

    def _settled(self, clock: estimate.Clock) -> list[Ratio]:
        """Of a phase all pairs are a family of their own, which is looked at when the race is over, at the level of its looks."""
        if clock in ("wall", "cpu"):
            return self.state.ratios if clock == "wall" else self.state.cpu_ratios
        asked = [(one.contender, one.baseline) for one in self.state.ratios] if self.state.over else []
        return estimate.ratios(self.windows, asked, MARGIN_RATIO, clock)


def inverse(ratio: Ratio) -> Ratio:
    words: dict[estimate.Verdict, estimate.Verdict] = {"faster": "slower", "slower": "faster"}
    return msgspec.structs.replace(
        ratio,
        contender=ratio.baseline,
        baseline=ratio.contender,
        verdict=words.get(ratio.verdict, ratio.verdict),
        effect=1 / ratio.effect if ratio.effect else None,
        low=1 / ratio.high if ratio.high else None,
        high=1 / ratio.low if ratio.low else None,
    )


@dataclass(frozen=True)
class CellTime:
    """What the race says of one cell. Values are by start."""

    race: Raced
    cell: Cell
    plan: Plan
    windows: list[Window]
    started: list[Started]
    images: float | None = None
    """In a whole training, where trainings have shown that it is not what was planned (early stopping)."""

    @property
    def length_known(self) -> bool:
        """With early stopping, how long a training is shows only when there was one."""
        return self.images is not None or not self.stops_early

    @property
    def stops_early(self) -> bool:
        return self.cell.recipe.early_stopping.patience > 0

    @cached_property
    def whole_images(self) -> float:
        epochs, rest = divmod(self.plan.total_steps, self.plan.steps_per_epoch)
        planned = epochs * self.plan.train_samples + min(rest * self.plan.global_batch, self.plan.train_samples)
        return self.images if self.images is not None else planned

    @cached_property
    def wall(self) -> dict[int, float]:
        """Seconds for an image."""
        return self.costs("wall")

    @cached_property
    def cost(self) -> float:
        return statistics.median(self.wall.values())

    @cached_property
    def evaluation(self) -> float | None:
        """Seconds of one."""
        known = [start.evaluation for start in self.started if start.evaluation is not None]
        return statistics.median(known) if known else None

    def costs(self, clock: estimate.Clock) -> dict[int, float]:
        """Seconds for an image by one clock; empty where its ranks do not tell."""
        if not all(window.knows(clock) for window in self.windows):
            return {}
        by_start: dict[int, list[Window]] = {}
        for window in self.windows:
            by_start.setdefault(window.start, []).append(window)
        return {
            start: middle_mean([window.cost(clock) for window in _clean(windows)])
            for start, windows in by_start.items()
        }

    def values(self, metric: str) -> dict[int, float]:
        """A metric of the placement, by start; empty where the race does not say."""
        of = VALUES.get(metric)
        return of(self) if of and (self.length_known or metric not in OF_A_TRAINING) else {}

    def phases(self) -> dict[str, float]:
        """Mean seconds of each phase of a step, the median over windows."""
        names = self.windows[0].phases
        return {
            name: statistics.median(window.phases.get(name, 0.0) / window.steps for window in _clean(self.windows))
            for name in names
        }


def _clean(windows: Sequence[Window]) -> Sequence[Window]:
    return estimate.undisturbed(windows, lambda window: window.disturbed)


def _scaled(values: Mapping[int, float], factor: float) -> dict[int, float]:
    return {start: factor * value for start, value in values.items()}


def _at_start(name: str) -> Callable[[CellTime], dict[int, float]]:
    """What was looked at once in each start."""

    def values(time: CellTime) -> dict[int, float]:
        found = {start.start: getattr(start, name) for start in time.started}
        return {start: value for start, value in found.items() if value is not None}

    return values


VALUES: dict[str, Callable[[CellTime], dict[int, float]]] = {
    "seconds": lambda time: _scaled(time.wall, time.whole_images),
    "images_per_second": lambda time: {start: 1 / cost for start, cost in time.wall.items()},
    "cpu_seconds": lambda time: _scaled(time.costs("cpu"), time.whole_images),
    "forward_seconds": lambda time: _scaled(time.costs("forward"), time.whole_images),
    "backward_seconds": lambda time: _scaled(time.costs("backward"), time.whole_images),
    "core_seconds": lambda time: _scaled(time.wall, time.cell.cores * time.whole_images),
    "memory": _at_start("memory"),
    "memory_of_a_rank": _at_start("memory_of_a_rank"),
    COUNTED: _at_start(COUNTED),
}


OF_A_TRAINING = ("seconds", "cpu_seconds", "forward_seconds", "backward_seconds", "core_seconds")
"""Metrics of a whole training, however long it is."""


def read(folder: StudyFolder, planned: Planned) -> Raced | None:
    """What has raced so far; None where nothing has, or something else."""
    if not exists(folder.path / STATE):
        return None
    state = read_struct(folder.path / STATE, State, "the race of study")
    if state.cells != timed_content(planned)[0]:
        return None
    started = [msgspec.convert(line, Started) for line in read_records(folder.path / STARTED, Started)]
    return Raced(state, read_windows(folder), started)


def read_windows(folder: StudyFolder) -> list[Window]:
    return [msgspec.convert(line, Window) for line in read_records(folder.path / WINDOWS, Window)]
