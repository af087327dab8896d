"""A study on a cluster: its runs are Slurm jobs, many at once, because each has its own nodes.

Runs that are handed in together and ask for the same nodes and cores are tasks of one array: one entry in `squeue`. More than a few dozen are not
handed in at once: each has a folder, with a copy of the user's own data, and schedulers limit how many jobs a user may have.
"""

from __future__ import annotations

import platform
import shutil
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from lockstep.errors import InputError, RunFailed, RunLeft
from lockstep.launch.ending import HungUp, signals_as_interrupt
from lockstep.launch.slurm import launcher as slurm
from lockstep.launch.slurm import script
from lockstep.launch.slurm.job import RECORD, array_of, end
from lockstep.launch.stall import Stalled
from lockstep.run import DATA, ENDED, Run, Spec, read_json
from lockstep.study.execute import begin, forget_checkpoints, keep
from lockstep.study.plan import Item
from lockstep.study.session import Session
from lockstep.units import counted

# The others wait here.
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
    watch: slurm.JobWatch


def run_jobs(session: Session, items: list[Item]) -> None:
    """Submit all of them, a few dozen at a time, and wait. Ctrl-C cancels every job that has not ended; a closed terminal leaves them."""
    under_way = [job for item in items if (job := _adopt(session, item))]
    adopted = {job.item.digest for job in under_way}
    waiting = [item for item in items if item.digest not in adopted]
    begun = [job.run for job in under_way]
    with signals_as_interrupt(hung_up=HungUp):
        try:
            while waiting or under_way:
                room = AT_ONCE - len(under_way)
                under_way += _submit(session, waiting[:room], begun)
                waiting = waiting[room:]
                under_way = [job for job in under_way if not _ended(session, job)]
                if under_way:
                    time.sleep(LOOK_S)
        except KeyboardInterrupt:
            _take_back([run for run in begun if run.recorded_status()["state"] not in ENDED])
            raise session.stopped() from None
        except HungUp:
            left = _leave([run for run in begun if run.recorded_status()["state"] not in ENDED])
            raise RunLeft(
                f"the terminal was closed: {counted(left, 'Slurm job')} of study '{session.folder.name}' {'goes' if left == 1 else 'go'} on; "
                "run the same command again to wait for them and go on"
            ) from None


def _take_back(runs: list[Run]) -> None:
    """Found through their folders: the interrupt may have come after a job was submitted and before we noted it."""
    jobs = [str(record["job"]) for run in runs if (record := read_json(run.folder / RECORD))]
    for job in dict.fromkeys(map(array_of, jobs)):
        slurm.cancel(job)
    for job in jobs:
        end(job)
    for run in runs:
        run.write_final_status("cancelled", cause="stopped by the user")


def _leave(runs: list[Run]) -> int:
    """How many of these have a job, which goes on. What was not handed in yet is not under way."""
    left = [run for run in runs if slurm.submitted(run)]
    for run in runs:
        if run not in left:
            run.write_final_status("cancelled", cause="the terminal was closed before it was submitted")
    return len(left)


def _adopt(session: Session, item: Item) -> Job | None:
    """A job that an earlier call submitted before it was killed."""
    run = session.jobs.get(item.digest)
    record = read_json(run.folder / RECORD) if run else None
    if run is None or record is None:
        return None
    spec = run.spec()
    session.watcher.says(f"Slurm job {record['job']} of cell '{item.cell}' is still under way: it is waited for")
    return _job(item, run, spec, str(record["job"]), float(record["submitted"]))


def _job(item: Item, run: Run, spec: Spec, number: str, began: float) -> Job:
    return Job(item, run, spec, number, began, slurm.JobWatch(run, spec, number, LOOK_S))


@dataclass
class Begun:
    """A run whose folder is made, and which was not submitted yet."""

    item: Item
    run: Run
    spec: Spec
    began: float


def _submit(session: Session, items: list[Item], begun: list[Run]) -> list[Job]:
    """Make the folders of these runs, and hand them in: as one array those that ask for the same."""
    batches: list[list[Begun]] = []
    for item in items:
        began = session.clock()
        session.watcher.begins(session.step(item))
        run, spec = begin(session, item)
        begun.append(run)
        run.write_status("starting", host=platform.node())
        batch = next((each for each in batches if script.asked_alike(each[0].spec, spec)), None)
        if batch is None:
            batches.append(batch := [])
        batch.append(Begun(item, run, spec, began))
    return [job for batch in batches for job in _hand_in(session, batch)]


def _hand_in(session: Session, batch: list[Begun]) -> list[Job]:
    try:
        if len(batch) == 1:
            numbers = [slurm.submit(batch[0].run, batch[0].spec)]
        else:
            numbers = slurm.submit_array(session.folder.name, [(each.run, each.spec) for each in batch], AT_ONCE)
    except InputError as error:
        for each in batch:
            each.run.write_final_status("failed", cause=str(error))
            _keep(session, each.item, each.run, each.began, {"state": "failed", "cause": str(error)})
        return []
    for each, number in zip(batch, numbers, strict=True):
        if each.run.recorded_status()["state"] == "starting":
            each.run.write_status("starting", host=platform.node(), job=number)
    return [
        _job(each.item, each.run, each.spec, number, each.began) for each, number in zip(batch, numbers, strict=True)
    ]


def _ended(session: Session, job: Job) -> bool:
    """Whether the job is over; if so, record how it ended."""
    over = job.watch.ask()
    try:
        if over:
            slurm.conclude(job.run, job.number, job.watch.state)
        job.watch.check()
    except Stalled as stalled:
        slurm.end_stalled(job.run, job.number, stalled)
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
    if item.digest in session.cut:
        account["resumed"] = True
    if record["state"] == "done":
        forget_checkpoints(run, session.cut.pop(item.digest, None))
    keep(session, session.step(item), account | record)
    return True
