"""A study on a cluster: its runs are Slurm jobs, many at once, because each has its own nodes."""

from __future__ import annotations

import platform
import shutil
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from lockstep.errors import InputError, RunCancelled, RunFailed
from lockstep.launch.ending import signals_as_interrupt
from lockstep.launch.slurm import launcher as slurm
from lockstep.launch.slurm.job import LEAVE_S, RECORD, end
from lockstep.launch.stall import Stalled, StallWatch
from lockstep.run import DATA, ENDED, Run, Spec, read_json
from lockstep.study.execute import begin, keep
from lockstep.study.plan import Item
from lockstep.study.session import Session

# Schedulers limit how many jobs a user may have; the others wait here.
AT_ONCE = 32
LOOK_S = 2.0


@dataclass
class Job:
    """One run that was submitted to the cluster."""

    item: Item
    run: Run
    spec: Spec
    number: str
    began: float
    stall: StallWatch
    left_since: float | None = field(default=None)


def run_jobs(session: Session, items: list[Item]) -> None:
    """Submit all of them, a few dozen at a time, and wait. Ctrl-C cancels every job that has not ended."""
    under_way = [job for item in items if (job := _adopt(session, item))]
    adopted = {job.item.digest for job in under_way}
    waiting = [item for item in items if item.digest not in adopted]
    begun = [job.run for job in under_way]
    with signals_as_interrupt():
        try:
            while waiting or under_way:
                while waiting and len(under_way) < AT_ONCE:
                    if job := _submit(session, waiting.pop(0), begun):
                        under_way.append(job)
                under_way = [job for job in under_way if not _ended(session, job)]
                if under_way:
                    time.sleep(LOOK_S)
        except KeyboardInterrupt:
            _take_back([run for run in begun if run.recorded_status()["state"] not in ENDED])
            raise RunCancelled(
                f"stopped; run the same command again to go on with study '{session.folder.name}'"
            ) from None


def _take_back(runs: list[Run]) -> None:
    """Found through their folders: the interrupt may have come after a job was submitted and before we noted it."""
    jobs = [str(record["job"]) for run in runs if (record := read_json(run.folder / RECORD))]
    for job in jobs:
        slurm.cancel(job)
    for job in jobs:
        end(job)
    for run in runs:
        run.write_final_status("cancelled", cause="stopped by the user")


def _adopt(session: Session, item: Item) -> Job | None:
    """A job that an earlier call submitted before it was killed."""
    run = session.jobs.get(item.digest)
    record = read_json(run.folder / RECORD) if run else None
    if run is None or record is None:
        return None
    spec = run.spec()
    session.watcher.says(f"Slurm job {record['job']} of cell '{item.cell}' is still under way: it is waited for")
    return Job(item, run, spec, str(record["job"]), float(record["submitted"]), StallWatch(run, spec))


def _submit(session: Session, item: Item, begun: list[Run]) -> Job | None:
    began = session.clock()
    session.watcher.begins(session.step(item))
    run, spec = begin(session, item)
    begun.append(run)
    run.write_status("starting", host=platform.node())
    try:
        number = slurm.submit(run, spec)
    except InputError as error:
        run.write_final_status("failed", cause=str(error))
        _keep(session, item, run, began, {"state": "failed", "cause": str(error)})
        return None
    if run.recorded_status()["state"] == "starting":
        run.write_status("starting", host=platform.node(), job=number)
    return Job(item, run, spec, number, began, StallWatch(run, spec))


def _ended(session: Session, job: Job) -> bool:
    """Whether the job is over; if so, record how it ended."""
    now, state = time.monotonic(), slurm.state(job.number)
    done = job.run.recorded_status()["state"] == "done"
    if state.name == "COMPLETING" or (state.name == "UNREACHABLE" and done):
        job.left_since = job.left_since or now
    over = state.ended or (job.left_since is not None and now - job.left_since > LEAVE_S)
    try:
        if over:
            slurm.conclude(job.run, job.number, state)
        elif state.name == "RUNNING":
            job.stall.check(now)
    except Stalled as stalled:
        end(job.number)
        job.run.write_final_status("stalled", cause=stalled.cause, rank=stalled.rank, job=job.number)
        return _keep(
            session, job.item, job.run, job.began, {"state": "failed", "cause": f"run stalled: {stalled.cause}"}
        )
    except (RunFailed, InputError) as error:
        return _keep(session, job.item, job.run, job.began, {"state": "failed", "cause": str(error)})
    return over and _keep(session, job.item, job.run, job.began, {"state": "done", "job": job.number})


def _keep(session: Session, item: Item, run: Run, began: float, record: dict[str, Any]) -> bool:
    run.release_reserve()
    shutil.rmtree(run.folder / DATA, ignore_errors=True)
    account = {**msgspec.to_builtins(item), "run": run.id, "began": began, "ended": session.clock()}
    keep(session, session.step(item), account | record)
    return True
