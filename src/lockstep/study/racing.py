"""The race of a study's cells (lockstep/turns/), kept in the study's folder as it goes: until every pair is settled, or its time is spent.

What it says of each cell is in timing.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Container, Sequence

import msgspec

from lockstep.errors import InputError
from lockstep.machine.cores import cores
from lockstep.machine.cpu import another_cpu, cpu_model
from lockstep.measure.environment import version_of
from lockstep.metrics import metric_of
from lockstep.reading import Damaged, exists
from lockstep.run import Options, append_line, read_struct, write_atomic, writing
from lockstep.statistics import MARGIN_RATIO
from lockstep.study.folder import StudyFolder
from lockstep.study.plan import Cell, Planned, timed_content, wanted_metrics
from lockstep.study.timing import STARTED, STATE, WINDOWS, Started, State, read_windows
from lockstep.turns import Before, Budget, Contender, Race, Ranks
from lockstep.turns.estimate import Pair, Window
from lockstep.turns.ranks import memory_problem

STARTS = "starts"
"""Where the ranks of each start have their folders, while they are there."""
# A start of all cells takes a second or two a rank, and four to eight of them settle most comparisons.
SECONDS_PER_RANK, LEAST_SECONDS = 15.0, 60.0


Listener = Callable[[Race], None]


def budget_of(planned: Planned) -> float:
    """Seconds: at most half of what the study may take in all."""
    study = planned.study
    usual = max(LEAST_SECONDS, SECONDS_PER_RANK * sum(cell.placement.ranks for cell in racing(planned)))
    asked = usual if study.race_minutes is None else 60.0 * study.race_minutes
    return asked if study.budget_minutes is None else min(asked, 30.0 * study.budget_minutes)


def racing(planned: Planned) -> list[Cell]:
    """The baseline first; nobody where nothing is asked about time or memory."""
    if all(metric_of(metric).learned for metric in wanted_metrics(planned.study)):
        return []
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
        if both and metric_of(claim.metric).of_placement and pair not in found and pair[::-1] not in found:
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

    def started(contender: Contender, start: int) -> None:
        assert isinstance(contender, Ranks)
        record = Started(cell=contender.name, start=start, **contender.look()._asdict())
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
        before=Before(
            windows=read_windows(folder), ratios=before.ratios, failures=before.failures, seconds=before.seconds
        ),
        lenient=True,
    )
    race.run()
    keep_state(race, over=True)
    return race.failures


def _keep(folder: StudyFolder, windows: Sequence[Window]) -> None:
    for window in windows:
        append_line(folder.path / WINDOWS, msgspec.to_builtins(window))


def _before(folder: StudyFolder, planned: Planned, says: Callable[[str], None]) -> State:
    """What this race has come to. Where another one has left its records (other cells, another machine, damage), it begins anew."""
    cells, own = timed_content(planned)
    here = State(cells=cells, own=own, machine=machine_here())
    try:
        there = read_struct(folder.path / STATE, State, "the race of study") if exists(folder.path / STATE) else None
        read_windows(folder)
        if there and (there.cells, there.own, there.machine) == (here.cells, here.own, here.machine):
            return there
        was, now = there.machine.get("cpu") if there else None, here.machine["cpu"]
        if was is not None and another_cpu(was, now):
            says(f"the cells raced on {was}, and this is {now}: they race again")
        elif there:
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
