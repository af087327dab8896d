"""The times of a study: its cells race in turns (lockstep/turns/), and what a whole training takes follows from its steps and evaluations.

race.json        what raced, for how long, and every ratio that was asked for, as of the look that settled it
windows.jsonl    all that was measured
looks.jsonl      of each start of a cell: the time of one evaluation, and its memory
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from lockstep.errors import InputError
from lockstep.metrics import METRICS
from lockstep.placement import Plan
from lockstep.reading import exists, read_records
from lockstep.run import Options, append_line, read_struct, write_atomic
from lockstep.shapes import Count, Number
from lockstep.statistics import MARGIN_RATIO
from lockstep.study.folder import StudyFolder
from lockstep.study.plan import Cell, Planned, timed_content
from lockstep.turns import Budget, Contender, Race, Ranks, estimate
from lockstep.turns.estimate import Pair, Ratio, Window, middle_mean

STATE, WINDOWS, LOOKS, STARTS = "race.json", "windows.jsonl", "looks.jsonl", "starts"
# A start of all cells takes a second or two a rank, and four to eight of them settle most comparisons.
SECONDS_PER_RANK, LEAST_SECONDS = 12.0, 60.0


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """One start of one cell, beside its windows."""

    cell: str
    start: int
    evaluation: Number | None = None
    memory: Number | None = None


class State(msgspec.Struct, frozen=True, kw_only=True):
    """A study's race, as far as it has come."""

    cells: str
    """A hash of what raced."""
    own: str = ""
    """A hash of the user's own files in it."""
    over: bool = False
    seconds: Number = 0.0
    budget: Number = 0.0
    starts: Count = 0
    disturbed: Count = 0
    failures: dict[str, str] = {}
    ratios: list[Ratio] = []
    cpu_ratios: list[Ratio] = []


Listener = Callable[[Race], None]


def budget_of(planned: Planned) -> float:
    """Seconds: at most half of what the study may take in all."""
    study = planned.study
    if study.race_minutes is not None:
        return 60.0 * study.race_minutes
    usual = max(LEAST_SECONDS, SECONDS_PER_RANK * sum(cell.placement.ranks for cell in racing(planned)))
    return usual if study.budget_minutes is None else min(usual, 30.0 * study.budget_minutes)


def racing(planned: Planned) -> list[Cell]:
    """The baseline first."""
    able = [cell for cell in planned.cells if cell.takes_turns]
    return sorted(able, key=lambda cell: cell.name != planned.baseline) if len(able) > 1 else []


def pairs(planned: Planned) -> list[Pair]:
    """Every cell with the baseline, and the cells of every claim about time."""
    names = [cell.name for cell in racing(planned)]
    found = [(name, names[0]) for name in names[1:]]
    for claim in (claim for published in planned.study.published for claim in published.claims):
        pair = claim.more, claim.less
        both = {*pair} <= {*names} and claim.more != claim.less
        if both and METRICS[claim.metric].of_placement and pair not in found and pair[::-1] not in found:
            found.append(pair)
    return found


def run(
    folder: StudyFolder,
    planned: Planned,
    options: Options,
    changed: Listener = lambda race: None,
    again: bool = False,
) -> None:
    """Race until every pair is settled or the time is spent. A race that was stopped goes on; with `again`, also one in which a cell failed."""
    cells, before = racing(planned), _state(folder, planned)
    if not cells or (before and _is_over(before, budget_of(planned), again)):
        return
    if before is None:
        for name in (WINDOWS, LOOKS):
            (folder.path / name).unlink(missing_ok=True)
    names, own = timed_content(planned)
    state = State(cells=names, own=own, budget=budget_of(planned))
    contenders = [
        Ranks(cell.name, cell.recipe, cell.placement, folder.path / STARTS / str(number), options)
        for number, cell in enumerate(cells)
    ]

    def started(contender: Contender, start: int) -> None:
        assert isinstance(contender, Ranks)
        seen = contender.look()
        look = Look(cell=contender.name, start=start, evaluation=seen.evaluation, memory=seen.memory)
        append_line(folder.path / LOOKS, msgspec.to_builtins(look))

    race = Race(
        contenders,
        Budget(seconds=state.budget, margin=MARGIN_RATIO),
        lambda windows: _keep(folder, windows),
        changed,
        pairs=pairs(planned),
        started=started,
        windows=_windows(folder) if before else (),
        spent=before.seconds if before else 0.0,
    )
    shutil.rmtree(folder.path / STARTS, ignore_errors=True)  # of a race that was killed
    try:
        race.run()
        write_atomic(folder.path / STATE, msgspec.to_builtins(_of(race, state, over=True)))
    except InputError as error:
        raise InputError(
            str(error).replace("race: the budget", f"race_minutes={state.budget / 60:g}: that", 1)
        ) from None
    except BaseException:
        write_atomic(folder.path / STATE, msgspec.to_builtins(_of(race, state, over=False)))
        raise
    finally:
        shutil.rmtree(folder.path / STARTS, ignore_errors=True)


def _is_over(before: State, budget: float, again: bool) -> bool:
    if not before.over or (again and before.failures):
        return False
    return before.budget >= budget or all(ratio.verdict != "not settled" for ratio in before.ratios)


def _of(race: Race, state: State, over: bool) -> State:
    return msgspec.structs.replace(
        state,
        over=over,
        seconds=race.elapsed,
        starts=race.starts,
        disturbed=race.disturbed,
        failures=race.failures,
        ratios=race.ratios(),
        cpu_ratios=race.ratios("cpu"),
    )


def _keep(folder: StudyFolder, windows: Sequence[Window]) -> None:
    for window in windows:
        append_line(folder.path / WINDOWS, msgspec.to_builtins(window))


def _windows(folder: StudyFolder) -> list[Window]:
    return [msgspec.convert(line, Window) for line in read_records(folder.path / WINDOWS, Window)]


def _state(folder: StudyFolder, planned: Planned) -> State | None:
    """None where nothing has raced yet, or something else has. A race that was killed has windows and no state of its own."""
    cells, own = timed_content(planned)
    if exists(folder.path / STATE):
        state = read_struct(folder.path / STATE, State, "the study's race")
        if (state.cells, state.own) == (cells, own):
            return state
    write_atomic(folder.path / STATE, msgspec.to_builtins(State(cells=cells, own=own)))
    return None


# ---------------------------------------------------------------- what it says


@dataclass(frozen=True)
class Raced:
    """A study's race, as it was kept."""

    state: State
    windows: list[Window]
    looks: list[Look]
    asked: dict[tuple[str, str, str], Ratio] = field(default_factory=dict)

    def of(self, cell: Cell) -> CellTime | None:
        windows = [window for window in self.windows if window.contender == cell.name]
        if not windows or cell.plan is None or cell.name in self.state.failures:
            return None
        return CellTime(self, cell, cell.plan, windows, [look for look in self.looks if look.cell == cell.name])

    def ratio(self, contender: str, baseline: str, clock: estimate.Clock = "wall") -> Ratio:
        """As the race settled it; what it was not asked for is worked out from its windows, at the same level."""
        for one in self.state.ratios if clock == "wall" else self.state.cpu_ratios:
            if (one.contender, one.baseline) == (contender, baseline):
                return one
            if (one.contender, one.baseline) == (baseline, contender):
                return inverse(one)
        key = contender, baseline, clock
        if key not in self.asked:
            (self.asked[key],) = estimate.ratios(self.windows, [(contender, baseline)], MARGIN_RATIO, clock)
        return self.asked[key]


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
    looks: list[Look]
    images: float | None = None
    """In a whole training, where trainings have shown that it is not what was planned (early stopping)."""

    @cached_property
    def whole_images(self) -> float:
        epochs, rest = divmod(self.plan.total_steps, self.plan.steps_per_epoch)
        planned = epochs * self.plan.train_samples + min(rest * self.plan.global_batch, self.plan.train_samples)
        return self.images if self.images is not None else planned

    @cached_property
    def wall(self) -> dict[int, float]:
        return self._costs("wall")

    @cached_property
    def cpu(self) -> dict[int, float]:
        return self._costs("cpu")

    @cached_property
    def cost(self) -> float:
        """Seconds for an image."""
        return statistics.median(self.wall.values())

    @cached_property
    def evaluation(self) -> float | None:
        """Seconds of one."""
        known = [look.evaluation for look in self.looks if look.evaluation is not None]
        return statistics.median(known) if known else None

    def _costs(self, clock: estimate.Clock) -> dict[int, float]:
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
        return of(self) if of else {}

    def phases(self) -> dict[str, float]:
        """Mean seconds of each phase of a step, the median over windows."""
        names = self.windows[0].phases
        return {
            name: statistics.median(window.phases.get(name, 0.0) / window.steps for window in _clean(self.windows))
            for name in names
        }


def _clean(windows: Sequence[Window]) -> Sequence[Window]:
    clean = [window for window in windows if not window.disturbed]
    return clean if len(clean) >= estimate.LEAST_ROUNDS else windows


def _scaled(values: Mapping[int, float], factor: float) -> dict[int, float]:
    return {start: factor * value for start, value in values.items()}


def _memory(time: CellTime) -> dict[int, float]:
    return {look.start: look.memory for look in time.looks if look.memory is not None}


VALUES: dict[str, Callable[[CellTime], dict[int, float]]] = {
    "seconds": lambda time: _scaled(time.wall, time.whole_images),
    "images_per_second": lambda time: {start: 1 / cost for start, cost in time.wall.items()},
    "cpu_seconds": lambda time: _scaled(time.cpu, time.whole_images),
    "core_seconds": lambda time: _scaled(time.wall, time.cell.cores * time.whole_images),
    "memory": _memory,
    "memory_of_a_rank": lambda time: _scaled(_memory(time), 1 / time.cell.placement.ranks),
}


def read(folder: StudyFolder, planned: Planned) -> Raced | None:
    """What has raced so far; None where nothing has, or something else."""
    if not exists(folder.path / STATE):
        return None
    state = read_struct(folder.path / STATE, State, "the study's race")
    if state.cells != timed_content(planned)[0]:
        return None
    looks: Iterable[dict[str, object]] = read_records(folder.path / LOOKS, Look)
    return Raced(state, _windows(folder), [msgspec.convert(line, Look) for line in looks])
