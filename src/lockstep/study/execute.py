"""Running a study: its cells race, then its recipes are trained, one after the other, each where that is fastest.

Stopped or killed at any moment, it goes on where it was.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from lockstep.errors import InputError, RunCancelled, RunFailed
from lockstep.launch import execute
from lockstep.launch.slurm.launcher import allocation
from lockstep.launch.supervise import Progress
from lockstep.reading import Damaged, exists
from lockstep.run import Options, Part, Run, Spec
from lockstep.study import estimate, proof, racing, timing
from lockstep.study.folder import StudyFolder
from lockstep.study.plan import LOOKS, Item, PlanChanged, Planned, apart, outcome, prepared
from lockstep.study.seeds import undecided
from lockstep.turns import Race
from lockstep.units import clock

# A cell that failed this often and never succeeded is not tried again: it would fail again.
GIVE_UP_AFTER = 2
# A race of less than this is not begun.
LEAST_RACE_S = 5.0


@dataclass
class Step:
    """The progress of the study, for display."""

    item: Item
    place: str
    """The cell in which it is trained."""
    number: int
    total: int
    left_seconds: float


class Watcher:
    """Receives events; this one ignores them."""

    def raced(self, race: Race) -> None:
        return None

    def begins(self, step: Step) -> Progress | None:
        return None

    def ended(self, step: Step, record: dict[str, Any]) -> None:
        return None

    def says(self, text: str) -> None:
        return None


@dataclass
class Session:
    """One call of `run`: its arguments and its state."""

    folder: StudyFolder
    planned: Planned
    options: Options
    runs: Path
    watcher: Watcher
    states: dict[str, str] = field(default_factory=dict)
    """By digest: done, failed, to do."""
    jobs: dict[str, Run] = field(default_factory=dict)
    """By digest: Slurm jobs that an earlier call left under way."""
    costs: dict[str, float] = field(default_factory=dict)
    """By cell: seconds for an image, where it has raced."""
    failed_in: set[tuple[str, str]] = field(default_factory=set)
    """Recipes (by their first cell), and cells in which their training failed."""
    spent: float = 0.0
    clock: Callable[[], float] = time.time

    def needed(self) -> list[Item]:
        """The trainings that are to be made next: up to the first look at which not all are, of those that are not told apart by then."""
        undecided_yet = {item.cell for item in self.planned.items}
        for look in LOOKS:
            items = [
                item
                for item in self.planned.items
                if item.repeat < look * self.planned.study.repeats and item.cell in undecided_yet
            ]
            to_do = [item for item in items if self.states[item.digest] == "to do" and not self.given_up(item.cell)]
            if to_do:
                return to_do
            undecided_yet = undecided(self.folder, self.planned, look * self.planned.study.repeats)
        return []

    def place(self, item: Item) -> str:
        """The cell in which this is trained: the fastest of those that compute it."""
        alike = [cell.name for cell in self.planned.alike(item.cell) if cell.left_out is None]
        able = [name for name in alike if (item.cell, name) not in self.failed_in] or alike
        return min(able, key=lambda name: self.costs.get(name, math.inf))

    def step(self, item: Item, left_seconds: float = 0.0) -> Step:
        done = sum(state != "to do" for state in self.states.values())
        return Step(item, self.place(item), done + 1, done + len(self.needed()), left_seconds)

    def stopped(self) -> RunCancelled:
        return RunCancelled(f"stopped; run the same command again to go on with study '{self.folder.name}'")

    def given_up(self, cell: str) -> bool:
        alike = [other for other in self.planned.alike(cell) if other.left_out is None]
        if any((cell, other.name) not in self.failed_in for other in alike) and len(alike) > 1:
            return False
        states = [self.states[item.digest] for item in self.planned.items if item.cell == cell]
        return "done" not in states and states.count("failed") >= GIVE_UP_AFTER


def run(
    folder: StudyFolder,
    planned: Planned,
    options: Options | None = None,
    again: bool = False,
    watcher: Watcher | None = None,
) -> dict[str, int]:
    """Race, prove, train: whatever of it is not done yet. Returns how many trainings are done, failed and left.

    Ctrl-C raises RunCancelled; what was measured is kept, and the same call goes on from there.
    """
    watcher = watcher or Watcher()
    with folder.held():
        planned = _as_proven_before(folder, planned)
        folder.write(planned)
        session = Session(folder, planned, options or Options(), folder.runs, watcher)
        if not _budget_is_spent(session, LEAST_RACE_S):
            _race(session, again)
        _prove(session)
        _look(session, again)
        on_cluster = {
            cell.name for cell in planned.cells if cell.placement.launcher == "slurm" and allocation() is None
        }
        while items := session.needed():
            if on_cluster & {item.cell for item in items}:
                from lockstep.study.cluster import run_jobs

                run_jobs(session, [item for item in items if item.cell in on_cluster])
            if not _one_by_one(session, [item for item in items if item.cell not in on_cluster]):
                break
    states = list(session.states.values())
    return {"done": states.count("done"), "failed": states.count("failed"), "left": len(session.needed())}


def _as_proven_before(folder: StudyFolder, planned: Planned) -> Planned:
    """A cell that was found not to compute what its recipe says is still trained by itself."""
    with suppress(Damaged, InputError):
        for cell in folder.read().cells if exists(folder.path / "study.json") else []:
            same = [
                one
                for one in planned.cells
                if (one.name, one.recipe, one.placement) == (cell.name, cell.recipe, cell.placement)
            ]
            if cell.unproven and same:
                planned = apart(planned, cell.name, cell.unproven)
    return planned


def _race(session: Session, again: bool) -> None:
    """The time part."""
    planned, watcher = session.planned, session.watcher
    if not racing.racing(planned):
        return
    try:
        racing.run(session.folder, planned, session.options, watcher.raced, watcher.says, again)
    except KeyboardInterrupt:
        raise session.stopped() from None
    raced = timing.read(session.folder, planned)
    if raced is None:
        return
    session.spent += raced.state.seconds
    for name, why in raced.state.failures.items():
        watcher.says(f"cell '{name}' fell out of the race: {why}")
    cells = [time for cell in planned.cells if (time := raced.of(cell))]
    session.costs = {time.cell.name: time.cost for time in cells}


def _prove(session: Session) -> None:
    """Cells whose accuracy is to come from trainings that were made elsewhere. One that fails is trained by itself."""
    root = session.runs
    cells = [cell for cell in proof.unproven(session.planned) if not proof.known(root, cell)]
    for number, cell in enumerate(cells, 1):
        session.watcher.says(f"[proof {number}/{len(cells)}] {cell.name}: does it compute what one process does?")
        try:
            wrong = proof.prove(session.folder, cell, session.options.data_root)
        except (KeyboardInterrupt, RunCancelled):
            raise session.stopped() from None
        if wrong is not None:
            session.watcher.says(
                f"cell '{cell.name}' does NOT compute what one process would, and is trained by itself: {wrong}"
            )
            session.planned = apart(session.planned, cell.name, wrong)
            session.folder.write(session.planned)


def _look(session: Session, again: bool) -> None:
    """How each training that this study has started ended, according to its own folder (the log may lag behind)."""
    there = session.folder.runs_of(session.planned.items)
    for item in session.planned.items:
        state = outcome(there.get(item.digest), again)
        if state == "busy":
            if session.planned.cell(item.cell).placement.launcher != "slurm":
                raise InputError(f"run {there[item.digest].id} is under way in another process: wait for it to end")
            session.jobs[item.digest], state = there[item.digest], "to do"
        session.states[item.digest] = state
    digests = set(session.states)
    session.spent += sum(r["ended"] - r["began"] for r in session.folder.records() if r.get("digest") in digests)


def _one_by_one(session: Session, items: list[Item]) -> bool:
    """False where the budget is spent."""
    for number, item in enumerate(items):
        if session.states[item.digest] != "to do" or session.given_up(item.cell):
            continue
        seconds = estimate.of_cells(session.planned, session.folder.records(), session.runs, session.costs)
        if _budget_is_spent(session, seconds[session.place(item)].seconds):
            return False
        left = sum(seconds[session.place(other)].seconds for other in items[number:])
        _one(session, session.step(item, left))
    return True


def _budget_is_spent(session: Session, next_s: float) -> bool:
    budget = session.planned.study.budget_minutes
    if budget is None or session.spent + next_s <= 60 * budget:
        return False
    session.watcher.says(
        f"budget_minutes={budget:g} is used up ({clock(session.spent)} so far, the next part takes about {clock(next_s)}): "
        "the rest is left; raise it and run the study again to go on"
    )
    return True


def begin(session: Session, item: Item) -> tuple[Run, Spec]:
    """A planned training that is about to start; its study knows its name before the run exists."""
    place = session.place(item)
    part = Part(study=session.folder.name, cell=place, block=item.repeat)
    known = partial(session.folder.begins, item)
    return prepared(session.planned, item, place, session.options, session.runs, part, known)


def _one(session: Session, step: Step) -> None:
    """One training, with an account of where the time beside training went."""
    item, began = step.item, session.clock()
    record: dict[str, Any] = msgspec.to_builtins(item)
    progress = session.watcher.begins(step)
    try:
        run, spec = begin(session, item)
        record["run"], ready = run.id, session.clock()
        execute(run, spec, progress=progress)
        record |= {"state": "done", **_overhead(run, began, ready, session.clock())}
    except RunCancelled:
        raise session.stopped() from None
    except PlanChanged:
        raise
    except (RunFailed, InputError) as error:
        record |= {"state": "failed", "cause": str(error)}
        session.failed_in.add((item.cell, session.place(item)))
    record |= {"began": began, "ended": session.clock()}
    keep(session, step, record)


def keep(session: Session, step: Step, record: dict[str, Any]) -> None:
    """Record how a run ended."""
    session.folder.log(record)
    session.states[step.item.digest] = record["state"]
    session.spent += record["ended"] - record["began"]
    session.watcher.ended(step, record)
    if record["state"] == "failed" and session.given_up(step.item.cell):
        session.watcher.says(
            f"cell '{step.item.cell}' failed {GIVE_UP_AFTER} times and never succeeded: its other repeats are left out"
        )


def _overhead(run: Run, began: float, prepared: float, ended: float) -> dict[str, float]:
    """Seconds around training: checking and planning, until the first step, and from the last result until all processes are gone."""
    summary, status = run.summary() or {}, run.recorded_status()
    fit, done = float(summary.get("fit_seconds") or 0.0), float(status["since"])
    return {
        "fit_s": fit,
        "prepare_s": prepared - began,
        "start_s": done - fit - prepared,
        "finish_s": ended - done,
    }
