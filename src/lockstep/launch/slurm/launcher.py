"""`slurm`: submit a run as a batch job and follow it, or leave it to itself; inside an allocation, start its ranks there.

One run from its folder to its end. The single steps, `submit`, `state` and `cancel`, are in job.py, for whoever has many
jobs under way at once.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import threading
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.errors import InputError, RunCancelled, RunFailed, RunLeft
from lockstep.launch.base import Start
from lockstep.launch.ending import FolderWatch, HungUp, recorded_end, signals_as_interrupt
from lockstep.launch.hang import HangWatch
from lockstep.launch.slurm import script
from lockstep.launch.slurm.ended import conclude, end_stalled, fail, last_words
from lockstep.launch.slurm.job import LEAVE_S, LOOK_S, RECORD, JobState, cancel, end, state, submit, submit_array
from lockstep.launch.stall import Stalled, StallWatch
from lockstep.launch.supervise import PROGRESS_S, Progress, Reporter, supervise
from lockstep.run import Run, Spec, read_json, writing
from lockstep.units import counted

__all__ = [
    "JobState",
    "JobWatch",
    "cancel",
    "conclude",
    "end_stalled",
    "follow",
    "leave",
    "rejoin",
    "starts",
    "starts_short",
    "state",
    "submit",
    "submit_array",
    "submitted",
]

# Slurm is asked often at first, then seldom, because a controller serves thousands of jobs.
LOOK_SELDOM_S, SELDOM_AFTER_S = 5.0, 60.0
# Every rank's sign of life is a file that other nodes write: to read a hundred of them takes a while.
CHECK_S = 1.0
# Seconds after which a queued job is mentioned; the last interval repeats.
QUEUE_NOTES_S = (5.0, 30.0, 60.0)
WAITING = ("PENDING", "CONFIGURING", "UNREACHABLE")


def starts(spec: Spec, folder: Path, host_index: int) -> list[Start]:
    """The one command that brings the script to the cluster."""
    script.check(spec.placement)
    path = str(folder / script.NAME)
    if allocation() is None:
        return [Start(["sbatch", path], what="sbatch")]
    # By the folder: starts of two contenders of a race have the same name.
    shift = str(zlib.crc32(str(folder).encode()) % script.PORTS)
    argv = [sys.executable, "-m", "lockstep.launch.slurm.step", path]
    return [Start(argv, {script.PORT_SHIFT: shift}, what="srun")]


def starts_short(spec: Spec, folder: Path, worker: str) -> list[Start]:
    """A short job of another worker: in the allocation that we are in, or in one that salloc waits for. Its script is written here."""
    inside = allocation() is not None
    check_commands("srun" if inside else "salloc")
    if inside:
        _check_allocation(spec)
    path = folder / script.NAME
    with writing(folder):
        path.write_text(script.text(spec, folder, worker))
    shift = str(zlib.crc32(str(folder).encode()) % script.PORTS)
    options = [] if inside else [*script.resources(spec), *spec.placement.slurm.directives]
    argv = [sys.executable, "-m", "lockstep.launch.slurm.step", str(path), *options]
    return [Start(argv, {script.PORT_SHIFT: shift}, what="srun" if inside else "salloc")]


def allocation() -> str | None:
    """The job whose allocation we are in (salloc, or a job script of the user's)."""
    return os.environ.get("SLURM_JOB_ID")


def follow(run: Run, spec: Spec, progress: Progress | None, stop: threading.Event | None = None) -> None:
    """Run it on the cluster. Returns when it is done; raises what ended it otherwise."""
    inside = allocation() is not None
    try:
        check_commands("srun" if inside else "sbatch")
        if inside:
            _check_allocation(spec)
            script.write(run, spec)
    except InputError as error:
        run.write_final_status("failed", cause=str(error))
        raise
    if inside:
        _follow_step(run, spec, progress, stop)
    else:
        _follow_job(run, spec, progress)


def leave(run: Run, spec: Spec) -> str:
    """Submit it, and leave it to the cluster. Returns the job's id."""
    with signals_as_interrupt(), recorded_end(run, FolderWatch(run), lambda: _take_back(run)):
        return _submit(run, spec)


def rejoin(run: Run, progress: Progress | None) -> None:
    """Follow a job that was left, to its end. Whoever stops following does not stop the job."""
    check_commands("scontrol")
    spec, job = run.spec(), submitted(run)
    assert job is not None
    watch = FolderWatch(run)
    try:
        with signals_as_interrupt(hung_up=HungUp):
            ended = _watch(run, spec, job, watch, progress)
    except KeyboardInterrupt:
        raise RunCancelled(f"no longer following: {goes_on(run, job)}") from None
    except HungUp:
        raise RunLeft(f"the terminal was closed: {goes_on(run, job)}") from None
    except Stalled as stalled:
        end_stalled(run, job, stalled)
        raise RunFailed(f"run stalled: {stalled.cause}; what was measured is in {run.folder}") from None
    conclude(run, job, ended)


def submitted(run: Run) -> str | None:
    """The run's job, if it was submitted as one."""
    job = (read_json(run.folder / RECORD) or {}).get("job")
    return str(job) if job else None


def goes_on(run: Run, job: str) -> str:
    return f"Slurm job {job} goes on; go back to it: lockstep follow {run.id}; end it: scancel {job}"


def check_commands(name: str) -> None:
    missing = [name for name in (name, "scontrol", "scancel") if shutil.which(name) is None]
    if missing:
        raise InputError(
            f"launcher=slurm needs {', '.join(missing)}: install Slurm's commands (slurm-client on Debian and Ubuntu, slurm on "
            "Fedora), or run this on a login node of the cluster"
        )


def _check_allocation(spec: Spec) -> None:
    nodes, hosts = os.environ.get("SLURM_JOB_NUM_NODES", ""), spec.placement.hosts
    if spec.gives_way:
        raise InputError(
            f"slurm.requeue=true, but this is inside Slurm job {allocation()}, which is not ours to queue again: leave it out, or unset "
            "SLURM_JOB_ID to submit a job of its own"
        )
    if nodes.isdigit() and int(nodes) < hosts:
        raise InputError(
            f"hosts={hosts}, but this is inside Slurm job {allocation()} with {counted(int(nodes), 'node')}: ask salloc for more, or unset "
            "SLURM_JOB_ID to submit a job of its own"
        )


def _follow_step(run: Run, spec: Spec, progress: Progress | None, stop: threading.Event | None) -> None:
    """Inside an allocation srun is a process of ours, and is watched as every launcher's are."""
    try:
        supervise(run, spec, starts(spec, run.folder, 0), 0, progress, stop)
    except RunFailed:
        status = run.recorded_status()
        if status["state"] != "failed" or "step" in status:
            raise
        by = "mpirun" if spec.placement.slurm.ranks_by == "mpirun" else "srun"
        fail(run, {"cause": f"{by} in Slurm job {allocation()} started no rank: {last_words(run)}"})


def _follow_job(run: Run, spec: Spec, progress: Progress | None) -> None:
    watch = FolderWatch(run)
    with signals_as_interrupt():
        with recorded_end(run, watch, lambda: _take_back(run)):
            job = _submit(run, spec)
            try:
                with signals_as_interrupt(hung_up=HungUp):
                    ended = _watch(run, spec, job, watch, progress)
            except HungUp:
                raise RunLeft(f"the terminal was closed: {goes_on(run, job)}") from None
        conclude(run, job, ended)


def _take_back(run: Run) -> dict[str, Any]:
    """Cancel what was submitted: its id is on record as soon as there is a job."""
    if (job := submitted(run)) is None:
        return {}
    end(job)
    return {"job": job}


def _submit(run: Run, spec: Spec) -> str:
    # No supervisor_pid: the job lives on without us, and its ranks' signs of life say how it does.
    run.write_status("starting", host=platform.node())
    job = submit(run, spec)
    if run.recorded_status()["state"] == "starting":
        run.write_status("starting", host=platform.node(), job=job)
    return job


def _watch(run: Run, spec: Spec, job: str, watch: FolderWatch, progress: Progress | None) -> JobState:
    """Until the job has ended. Progress comes from the run folder; Slurm is asked for what the folder cannot tell."""
    began, next_look, next_check = time.monotonic(), 0.0, 0.0
    queue, report = _Queue(job, began, silent=progress is None), Reporter(run, spec, progress)
    watched = JobWatch(run, spec, job, CHECK_S)
    while True:
        now = time.monotonic()
        if (problem := watch.problem()) is not None:
            raise problem
        if now >= next_look:
            over, done = watched.ask(), run.recorded_status()["state"] == "done"
            next_look = time.monotonic() + (LOOK_S if done or now - began < SELDOM_AFTER_S else LOOK_SELDOM_S)
            if over:
                break
            if watched.state.name in WAITING:
                queue.mention(watched.state)
        if watched.state.name not in WAITING:
            report()
        if now >= next_check:
            next_check = now + CHECK_S
            watched.check()
        time.sleep(PROGRESS_S)
    report()
    return watched.state


class JobWatch:
    """One job from turn to turn: how it stands, whether it is over, and whether its ranks go on. For one run that is followed, and for a study's."""

    def __init__(self, run: Run, spec: Spec, job: str, every_s: float = 0.0) -> None:
        """`every_s`: how often its ranks are looked at."""
        self._run, self._spec, self._job, self._every_s = run, spec, job, every_s
        self.state = JobState("PENDING")
        """As of the last time that Slurm was asked."""
        self._leaving_since: float | None = None
        self._look_anew()

    def ask(self) -> bool:
        """Ask Slurm how it stands. Whether it is over: ended, or for a long time about to be."""
        now, self.state = time.monotonic(), state(self._job)
        done = self._run.recorded_status()["state"] == "done"
        if self.state.name != "RUNNING":  # when it runs again, ranks of an earlier turn are not those that stand still
            self._look_anew()
        if self.state.name == "COMPLETING" or (self.state.name == "UNREACHABLE" and done):
            self._leaving_since = self._leaving_since or now
        else:  # it has had its turn, and waits for another one or is in it
            self._leaving_since = None
        late = self._leaving_since is not None and now - self._leaving_since > LEAVE_S
        # A job that gives way is ending for as long as its ranks write their checkpoint.
        return self.state.ended or (late and (done or not self._spec.gives_way))

    def _look_anew(self) -> None:
        self._stall, self._hang = StallWatch(self._spec, self._every_s), HangWatch(self._run, self._spec)

    def check(self) -> None:
        """Raise Stalled where a rank gives no sign of life, or waiting cannot help."""
        if self.state.name == "RUNNING":
            now, beats = time.monotonic(), self._run.rank_statuses()
            self._stall.check(now, beats)
            self._hang.check(now, beats)


class _Queue:
    """Says once in a while why nothing happens."""

    def __init__(self, job: str, began: float, silent: bool) -> None:
        self._job, self._began, self._silent = job, began, silent
        self._notes = 0
        self._next = began + QUEUE_NOTES_S[0]

    def mention(self, current: JobState) -> None:
        now = time.monotonic()
        if self._silent or now < self._next:
            return
        self._notes += 1
        self._next = now + QUEUE_NOTES_S[min(self._notes, len(QUEUE_NOTES_S) - 1)]
        what = "Slurm cannot be asked" if current.name == "UNREACHABLE" else current.name.lower()
        reason = f" ({current.reason})" if current.reason else ""
        with suppress(OSError):  # nobody looks on any more
            print(
                f"Slurm job {self._job}: {what}{reason}, {now - self._began:.0f} s so far", file=sys.stderr, flush=True
            )
