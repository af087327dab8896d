"""The times of a study: its cells race in turns (lockstep/turns/), and what a whole training takes follows from its steps and evaluations.

race.json        what raced, where, for how long, and every ratio that was asked for, as of the look that settled it
windows.jsonl    all that was measured
starts.jsonl     of each start of a cell: the time of one evaluation, and its memory
"""

from __future__ import annotations

import shutil
import statistics
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from lockstep.errors import InputError
from lockstep.machine.cores import cores
from lockstep.machine.cpu import cpu_model
from lockstep.measure.environment import version_of
from lockstep.metrics import METRICS
from lockstep.placement import Plan
from lockstep.reading import Damaged, exists, read_records
from lockstep.run import Options, append_line, read_struct, write_atomic, writing
from lockstep.shapes import Count, Number
from lockstep.statistics import MARGIN_RATIO
from lockstep.study.folder import StudyFolder
from lockstep.study.plan import Cell, Planned, timed_content
from lockstep.turns import Before, Budget, Contender, Race, Ranks, estimate
from lockstep.turns.estimate import Pair, Ratio, Window, middle_mean
from lockstep.turns.ranks import memory_problem

STATE, WINDOWS, STARTED, STARTS = "race.json", "windows.jsonl", "starts.jsonl", "starts"
# A start of all cells takes a second or two a rank, and four to eight of them settle most comparisons.
SECONDS_PER_RANK, LEAST_SECONDS = 15.0, 60.0
# An evaluation that takes longer than this is made in the first starts alone.
LONG_EVALUATION_S, LONG_EVALUATIONS = 1.0, 2


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """One start of one cell, beside its windows."""

    cell: str
    start: int
    evaluation: Number | None = None
    memory: Number | None = None
    memory_of_a_rank: Number | None = None


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


def pairs(planned: Planned, failed: Container[str] = ()) -> list[Pair]:
    """Every cell with the baseline (or the first that did not fail), and the cells of every claim about time."""
    names = [cell.name for cell in racing(planned)]
    names.sort(key=lambda name: name in failed)
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
    says: Callable[[str], None] = lambda text: None,
    again: bool = False,
) -> None:
    """Race until every pair is settled or the time is spent. A race that was stopped goes on; with `again`, also one in which a cell failed."""
    cells = racing(planned)
    if not cells:
        return
    with writing(folder.path):
        before = _before(folder, planned, says)
        again = again and bool(before.failures)
        if again:
            before = msgspec.structs.replace(before, failures={}, seconds=0.0)
        asked = pairs(planned, before.failures)
        settled = {(one.contender, one.baseline) for one in before.ratios if one.verdict != "not settled"}
        left = [pair for pair in asked if pair not in settled and not before.failures.keys() & {*pair}]
        if not left or (before.over and before.budget >= budget_of(planned) and not again):
            return
        if problem := memory_problem(cell.placement for cell in cells):
            raise InputError(f"study '{planned.study.name}': {problem}")
        shutil.rmtree(folder.path / STARTS, ignore_errors=True)  # of a race that was killed
        try:
            failures = _race(folder, planned, options, changed, before, asked)
            if asked[0][1] in failures and len(cells) - len(failures) > 1:
                # Without the baseline nobody has been compared with anybody: the others race against the first of them.
                now = _before(folder, planned, says)
                _race(folder, planned, options, changed, now, pairs(planned, failures))
        finally:
            shutil.rmtree(folder.path / STARTS, ignore_errors=True)


def _race(
    folder: StudyFolder, planned: Planned, options: Options, changed: Listener, before: State, asked: Sequence[Pair]
) -> dict[str, str]:
    """One race, kept as it goes. Returns who failed, and why."""
    contenders = [
        Ranks(cell.name, cell.recipe, cell.placement, folder.path / STARTS / str(number), options)
        for number, cell in enumerate(racing(planned))
    ]
    long_evaluations: Counter[str] = Counter()

    def started(contender: Contender, start: int) -> None:
        assert isinstance(contender, Ranks)
        if long_evaluations[contender.name] >= LONG_EVALUATIONS:
            return
        look = contender.look()
        long_evaluations[contender.name] += (look.evaluation or 0.0) > LONG_EVALUATION_S
        record = Started(cell=contender.name, start=start, **look._asdict())
        append_line(folder.path / STARTED, msgspec.to_builtins(record))

    kept = before.starts

    def keep_state(race: Race, over: bool = False) -> None:
        nonlocal kept
        if over or race.starts > kept:
            kept = race.starts
            state = msgspec.structs.replace(
                before,
                over=over,
                budget=race.budget.seconds,
                baseline=asked[0][1],
                seconds=race.elapsed,
                starts=race.starts,
                disturbed=race.disturbed,
                failures=race.failures,
                ratios=race.ratios(),
                cpu_ratios=race.ratios("cpu"),
            )
            write_atomic(folder.path / STATE, msgspec.to_builtins(state))
        changed(race)

    race = Race(
        contenders,
        Budget(seconds=budget_of(planned), margin=MARGIN_RATIO),
        lambda windows: _keep(folder, windows),
        keep_state,
        pairs=asked,
        started=started,
        before=Before(windows=_windows(folder), ratios=before.ratios, failures=before.failures, seconds=before.seconds),
        lenient=True,
    )
    race.run()
    keep_state(race, over=True)
    return race.failures


def _keep(folder: StudyFolder, windows: Sequence[Window]) -> None:
    for window in windows:
        append_line(folder.path / WINDOWS, msgspec.to_builtins(window))


def _windows(folder: StudyFolder) -> list[Window]:
    return [msgspec.convert(line, Window) for line in read_records(folder.path / WINDOWS, Window)]


def _before(folder: StudyFolder, planned: Planned, says: Callable[[str], None]) -> State:
    """What this race has come to. Where another one has left its records (other cells, another machine, damage), it begins anew."""
    cells, own = timed_content(planned)
    here = State(cells=cells, own=own, machine=machine_here())
    try:
        there = read_struct(folder.path / STATE, State, "the race of study") if exists(folder.path / STATE) else None
        _windows(folder)
        if there and (there.cells, there.own, there.machine) == (here.cells, here.own, here.machine):
            return there
        if there:
            says("the cells, the machine or its software have changed since they raced: they race again")
    except Damaged as error:
        says(f"{error}: the cells race again")
    for name in (STATE, WINDOWS, STARTED):
        (folder.path / name).unlink(missing_ok=True)
    write_atomic(folder.path / STATE, msgspec.to_builtins(here))
    return here


def machine_here() -> dict[str, str]:
    """What times depend on."""
    return {
        "cpu": cpu_model(),
        "cores": str(cores()),
        "torch": version_of("torch") or "unknown",
        "lockstep": version_of("lockstep") or "unknown",
    }


# ---------------------------------------------------------------- what it says


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
        for one in self.state.ratios if clock == "wall" else self.state.cpu_ratios:
            if (one.contender, one.baseline) == (contender, baseline):
                return one
            if (one.contender, one.baseline) == (baseline, contender):
                return inverse(one)
        (now,) = estimate.ratios(self.windows, [(contender, baseline)], MARGIN_RATIO, clock)
        return msgspec.structs.replace(now, verdict="not settled")


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
        known = [start.evaluation for start in self.started if start.evaluation is not None]
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
    return {start.start: start.memory for start in time.started if start.memory is not None}


def _memory_of_a_rank(time: CellTime) -> dict[int, float]:
    return {start.start: start.memory_of_a_rank for start in time.started if start.memory_of_a_rank is not None}


VALUES: dict[str, Callable[[CellTime], dict[int, float]]] = {
    "seconds": lambda time: _scaled(time.wall, time.whole_images),
    "images_per_second": lambda time: {start: 1 / cost for start, cost in time.wall.items()},
    "cpu_seconds": lambda time: _scaled(time.cpu, time.whole_images),
    "core_seconds": lambda time: _scaled(time.wall, time.cell.cores * time.whole_images),
    "memory": _memory,
    "memory_of_a_rank": _memory_of_a_rank,
}


def read(folder: StudyFolder, planned: Planned) -> Raced | None:
    """What has raced so far; None where nothing has, or something else."""
    if not exists(folder.path / STATE):
        return None
    state = read_struct(folder.path / STATE, State, "the race of study")
    if state.cells != timed_content(planned)[0]:
        return None
    started = [msgspec.convert(line, Started) for line in read_records(folder.path / STARTED, Started)]
    return Raced(state, _windows(folder), started)
