"""Running a study: one run at a time, each in its own processes; stopped or killed at any moment, it resumes where it was."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from lockstep.errors import InputError, RunCancelled, RunFailed
from lockstep.launch import execute
from lockstep.launch.slurm.launcher import allocation
from lockstep.launch.supervise import Progress
from lockstep.run import Options, Part, Run, Spec
from lockstep.study import blocks, estimate
from lockstep.study.folder import StudyFolder
from lockstep.study.plan import Item, PlanChanged, Planned, outcome, prepared
from lockstep.units import clock, counted

# A cell that failed this often and never succeeded is not tried again: it would fail again.
GIVE_UP_AFTER = 2


@dataclass
class Step:
    """The progress of the study, for display."""

    item: Item
    number: int
    total: int
    left_seconds: float


class Watcher:
    """Receives events; this one ignores them."""

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
    spent: float = 0.0
    clock: Callable[[], float] = time.time

    def to_do(self) -> list[Item]:
        return [
            item for item in self.planned.items if self.states[item.digest] == "to do" and not self.given_up(item.cell)
        ]

    def step(self, item: Item, left_seconds: float = 0.0) -> Step:
        done = sum(state != "to do" for state in self.states.values())
        return Step(item, done + 1, len(self.planned.items), left_seconds)

    def given_up(self, cell: str) -> bool:
        states = [self.states[item.digest] for item in self.planned.items if item.cell == cell]
        return "done" not in states and states.count("failed") >= GIVE_UP_AFTER


def run(
    folder: StudyFolder,
    planned: Planned,
    options: Options | None = None,
    again: bool = False,
    watcher: Watcher | None = None,
) -> dict[str, int]:
    """Run what is not done yet. Returns how many runs are done, failed and left; Ctrl-C raises RunCancelled after one is ended."""
    watcher = watcher or Watcher()
    with folder.held():
        folder.write(planned)
        session = Session(folder, planned, options or Options(), folder.runs, watcher)
        _look(session, again)
        on_cluster = {
            cell.name for cell in planned.cells if cell.placement.launcher == "slurm" and allocation() is None
        }
        if on_cluster:
            from lockstep.study.cluster import run_jobs

            run_jobs(session, [item for item in session.to_do() if item.cell in on_cluster])
        _one_by_one(session, on_cluster)
    states = list(session.states.values())
    return {"done": states.count("done"), "failed": states.count("failed"), "left": states.count("to do")}


def _look(session: Session, again: bool) -> None:
    """How each run that this study has started ended, according to its own folder (the log may lag behind)."""
    there = session.folder.runs_of(session.planned.items)
    for item in session.planned.items:
        state = outcome(there.get(item.digest), again)
        if state == "busy":
            if session.planned.cell(item.cell).placement.launcher != "slurm":
                raise InputError(f"run {there[item.digest].id} is under way in another process: wait for it to end")
            session.jobs[item.digest], state = there[item.digest], "to do"
        session.states[item.digest] = state
    to_do = {item.digest for item in session.to_do()}
    again_too = blocks.broken(session.planned, there, to_do, session.clock())
    for item in again_too:
        session.states[item.digest] = "to do"
    if again_too:
        repeats = sorted({item.repeat + 1 for item in again_too})
        session.watcher.says(
            f"repeat {', '.join(map(str, repeats))} has runs to do, and its others ended more than {blocks.APART_S / 60:.0f} minutes ago: "
            f"{counted(len(again_too), 'finished run')} of it will be made again, because times are compared within minutes"
        )
    digests = set(session.states)
    session.spent = sum(r["ended"] - r["began"] for r in session.folder.records() if r.get("digest") in digests)


def _one_by_one(session: Session, elsewhere: set[str]) -> None:
    while True:
        items = [item for item in session.to_do() if item.cell not in elsewhere]
        if not items:
            return
        seconds = estimate.of_cells(session.planned, session.folder.records(), session.runs)
        if _budget_is_spent(session, seconds[items[0].cell].seconds):
            return
        _one(session, session.step(items[0], estimate.left(items, seconds)))


def _budget_is_spent(session: Session, next_s: float) -> bool:
    budget = session.planned.study.budget_minutes
    if budget is None or session.spent + next_s <= 60 * budget:
        return False
    session.watcher.says(
        f"budget_minutes={budget:g} is used up ({clock(session.spent)} so far, the next run takes about "
        f"{clock(next_s)}): the rest is left; raise it and run the study again to go on"
    )
    return True


def begin(session: Session, item: Item) -> tuple[Run, Spec]:
    """A planned run that is about to start; its study knows its name before the run exists."""
    part = Part(study=session.folder.name, cell=item.cell, block=item.repeat)
    known = partial(session.folder.begins, item)
    return prepared(session.planned, item, session.options, session.runs, part, known)


def _one(session: Session, step: Step) -> None:
    """One run, with an account of where the time beside training went."""
    item, began = step.item, session.clock()
    record: dict[str, Any] = msgspec.to_builtins(item)
    progress = session.watcher.begins(step)
    try:
        run, spec = begin(session, item)
        record["run"], ready = run.id, session.clock()
        execute(run, spec, progress=progress)
        record |= {"state": "done", **_overhead(run, began, ready, session.clock())}
    except RunCancelled:
        raise RunCancelled(f"stopped; run the same command again to go on with study '{session.folder.name}'") from None
    except PlanChanged:
        raise
    except (RunFailed, InputError) as error:
        record |= {"state": "failed", "cause": str(error)}
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
