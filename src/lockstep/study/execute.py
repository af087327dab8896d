"""Running a study: its cells race, then its recipes are trained, one after the other, each where that is fastest.

Stopped or killed at any moment, it goes on where it was.
"""

from __future__ import annotations

import shutil
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

import msgspec

from lockstep.errors import InputError, RunCancelled, RunFailed
from lockstep.launch import execute
from lockstep.reading import Damaged, exists
from lockstep.run import CHECKPOINTS, Options, Part, Run, Spec
from lockstep.study import proof, racing, timing
from lockstep.study.beside import CHECKED, Beside, beside
from lockstep.study.folder import StudyFolder
from lockstep.study.plan import Item, PlanChanged, Planned, apart, outcome, prepared
from lockstep.study.session import GIVE_UP_AFTER, Session, Step, Watcher
from lockstep.units import clock

# A race of less than this is not begun.
LEAST_RACE_S = 5.0
# A training that takes longer than this keeps a checkpoint after every epoch: stopped or killed, it goes on from there.
LONG_TRAINING_S = 120.0


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
        on_cluster = {cell.name for cell in planned.cells if cell.job}
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
        began = session.clock()
        try:
            wrong = proof.prove(session.folder, cell, session.options.data_root)
        except (KeyboardInterrupt, RunCancelled):
            raise session.stopped() from None
        finally:
            session.folder.proof_took(cell.name, session.clock() - began)
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
        if state == "to do" and item.digest in there and (cut := session.folder.cut(item)):
            session.cut[item.digest] = cut
        if state == "busy":
            if not session.planned.cell(item.cell).job:
                raise InputError(f"run {there[item.digest].id} is under way in another process: wait for it to end")
            session.jobs[item.digest], state = there[item.digest], "to do"
        session.states[item.digest] = state
    digests = set(session.states)
    session.spent += sum(_whole(each) for each in session.folder.records() if each.get("digest") in digests)
    session.spent += session.folder.proving_seconds()


def _whole(record: dict[str, Any]) -> float:
    """Seconds of a training, with the windows before and after it that checked the race."""
    return float(record["ended"] - record["began"] + record.get("checked_s", 0.0))


def _one_by_one(session: Session, items: list[Item]) -> bool:
    """False where the budget is spent."""
    for number, item in enumerate(items):
        if session.states[item.digest] != "to do" or session.given_up(item.cell):
            continue
        seconds = session.seconds()
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
    place, options = session.place(item), session.options
    if session.seconds()[place].seconds > LONG_TRAINING_S:
        options = msgspec.structs.replace(options, checkpoint_every=1)
    if cut := session.cut.get(item.digest):
        options = msgspec.structs.replace(options, resume_from=str(cut.folder.absolute()))
    part = Part(study=session.folder.name, cell=place, block=item.repeat)
    known = partial(session.folder.begins, item)
    return prepared(session.planned, item, place, options, session.runs, part, known)


def _one(session: Session, step: Step) -> None:
    """One training, with an account of where the time beside training went."""
    item, entered = step.item, session.clock()
    began, ended = entered, 0.0
    record: dict[str, Any] = msgspec.to_builtins(item) | ({"resumed": True} if item.digest in session.cut else {})
    progress = session.watcher.begins(step)
    try:
        with _checked(session, step) as parked:
            began = session.clock()
            run, spec = begin(session, item)
            record["run"], ready = run.id, session.clock()
            execute(run, spec, progress=progress)
            ended = session.clock()
            record |= {"state": "done", **_overhead(run, began, ready, ended)}
            if parked:
                record["beside"] = parked.found()
        forget_checkpoints(run, session.cut.pop(item.digest, None))
    except RunCancelled:
        session.folder.log(record | {"state": "cut", "began": began, "ended": session.clock()})
        raise session.stopped() from None
    except PlanChanged:
        raise
    except (RunFailed, InputError) as error:
        if session.cut.pop(item.digest, None):
            _again(session, item, str(error), Run(session.runs / record["run"]) if "run" in record else None)
            return
        record |= {"state": "failed", "cause": str(error)}
        session.failed_in.add((item.cell, session.place(item)))
    over = session.clock()
    ended = ended or over
    record |= {"began": began, "ended": ended, "checked_s": (began - entered) + (over - ended)}
    keep(session, step, record)


def _checked(session: Session, step: Step) -> AbstractContextManager[Beside | None]:
    """The first trainings check what the race says. One that goes on from a checkpoint was not made in one piece."""
    checked = sum("beside" in record for record in session.folder.records())
    if step.place not in session.costs or step.item.digest in session.cut or checked >= CHECKED:
        return nullcontext()
    return beside(session.planned.cell(step.place), session.folder.path / racing.STARTS, session.options)


def _again(session: Session, item: Item, error: str, run: Run | None) -> None:
    """A training that was cut, went on, and ended: from where it got to, or from its start if it got nowhere."""
    if run is not None and run.has_checkpoint:
        session.cut[item.digest] = run
        how = "it ended again, and goes on from its last checkpoint"
    else:
        how = "it could not go on from its checkpoint, and begins anew"
    session.watcher.says(f"{item.cell}, seed {item.seed}: {how}: {error}")


def forget_checkpoints(*runs: Run | None) -> None:
    """They were for a training that might be stopped. Studies keep no weights."""
    for run in runs:
        if run is not None:
            shutil.rmtree(run.folder / CHECKPOINTS, ignore_errors=True)


def keep(session: Session, step: Step, record: dict[str, Any]) -> None:
    """Record how a run ended."""
    session.folder.log(record)
    session.states[step.item.digest] = record["state"]
    session.spent += _whole(record)
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
