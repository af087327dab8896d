"""`slurm`: submit a run as a batch job and follow it, or leave it to itself; inside an allocation, start its ranks there.

One run from its folder to its end. The single steps, `submit`, `state` and `cancel`, are in job.py, for whoever has many
jobs under way at once.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import threading
import time
import zlib
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from lockstep.errors import InputError, RunCancelled, RunFailed, RunLeft
from lockstep.launch.base import Start
from lockstep.launch.cause import failure, first_cause
from lockstep.launch.ending import FolderWatch, HungUp, recorded_end, signals_as_interrupt
from lockstep.launch.hang import HangWatch
from lockstep.launch.slurm import script
from lockstep.launch.slurm.job import LEAVE_S, LOOK_S, RECORD, JobState, cancel, end, state, submit, submit_array
from lockstep.launch.stall import Stalled, StallWatch
from lockstep.launch.supervise import PROGRESS_S, Progress, Reporter, supervise
from lockstep.run import QUEUE_AGAIN, Run, Spec, folder_problem, read_json, writing
from lockstep.text import last_line
from lockstep.units import counted

__all__ = [
    "JobState",
    "JobWatch",
    "cancel",
    "follow",
    "leave",
    "rejoin",
    "starts",
    "starts_short",
    "state",
    "submit",
    "submit_array",
]

# Slurm is asked often at first, then seldom, because a controller serves thousands of jobs.
LOOK_SELDOM_S, SELDOM_AFTER_S = 5.0, 60.0
# Seconds after which a queued job is mentioned; the last interval repeats.
QUEUE_NOTES_S = (5.0, 30.0, 60.0)
# Files that other hosts wrote may take a while to show here: the results of a job that succeeded are worth more waiting.
SHOW_S, SHOW_FAILED_S = 10.0, 2.0

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
    try:
        check_commands("srun" if allocation() else "sbatch")
        if allocation():
            _check_allocation(spec)
            script.write(run, spec)
    except InputError as error:
        run.write_final_status("failed", cause=str(error))
        raise
    if allocation():
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
        end(job)
        run.write_final_status("stalled", cause=stalled.cause, job=job, **stalled.named)
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
        _fail(run, {"cause": f"srun in Slurm job {allocation()} started no rank: {_last_words(run)}"})


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
    began, next_look = time.monotonic(), 0.0
    queue, report = _Queue(job, began, silent=progress is None), Reporter(run, spec, progress)
    watched = JobWatch(run, spec, job)
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
        watched.check()
        time.sleep(PROGRESS_S)
    report()
    return watched.state


class JobWatch:
    """One job from turn to turn: how it stands, whether it is over, and whether its ranks go on. For one run that is followed, and for a study's."""

    def __init__(self, run: Run, spec: Spec, job: str) -> None:
        self._run, self._spec, self._job = run, spec, job
        self.state = JobState("PENDING")
        """As of the last time that Slurm was asked."""
        self._leaving_since: float | None = None
        self._stall, self._hang = StallWatch(run, spec), HangWatch(run, spec)

    def ask(self) -> bool:
        """Ask Slurm how it stands. Whether it is over: ended, or for a long time about to be."""
        now, self.state = time.monotonic(), state(self._job)
        done = self._run.recorded_status()["state"] == "done"
        if self.state.name != "RUNNING":  # when it runs again, ranks of an earlier turn are not those that stand still
            self._stall, self._hang = StallWatch(self._run, self._spec), HangWatch(self._run, self._spec)
        if self.state.name == "COMPLETING" or (self.state.name == "UNREACHABLE" and done):
            self._leaving_since = self._leaving_since or now
        else:  # it has had its turn, and waits for another one or is in it
            self._leaving_since = None
        late = self._leaving_since is not None and now - self._leaving_since > LEAVE_S
        # A job that gives way is ending for as long as its ranks write their checkpoint.
        return self.state.ended or (late and (done or not self._spec.gives_way))

    def check(self) -> None:
        """Raise Stalled where a rank gives no sign of life, or waiting cannot help."""
        if self.state.name == "RUNNING":
            now = time.monotonic()
            self._stall.check(now)
            self._hang.check(now)


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


def conclude(run: Run, job: str, ended: JobState) -> None:
    record = {**(read_json(run.folder / RECORD) or {}), "ended": time.time(), **asdict(ended)}
    run.write_final(run.folder / RECORD, record)
    until = time.monotonic() + (SHOW_S if ended.name == "COMPLETED" else SHOW_FAILED_S)
    while run.recorded_status()["state"] != "done":
        accounts = any(True for pattern in ("failure", "exit") for _ in run.folder.glob(f"ranks/*/{pattern}.json"))
        # What the controller decided needs no account of a rank; else the folder may be some seconds behind.
        if ended.name in _DECIDED or accounts or time.monotonic() > until:
            _fail(run, _cause(run, job, ended))
        time.sleep(LOOK_S / 2)


def _fail(run: Run, cause: dict[str, Any]) -> NoReturn:
    run.write_final_status("failed", **cause)
    raise failure(run, cause)


# Endings that Slurm decided: the signals that ranks then died of are consequences.
_DECIDED = {
    "CANCELLED": "was cancelled (scancel)",
    "TIMEOUT": "reached its time limit: give it more with slurm.time",
    "NODE_FAIL": "lost a node",
    "PREEMPTED": "had to give way to another job",
    "BOOT_FAIL": "got a node that did not start",
    "DEADLINE": "reached its deadline",
    "REVOKED": "was taken to another cluster",
}


def _cause(run: Run, job: str, ended: JobState) -> dict[str, Any]:
    """The first cause: what Slurm decided, else what a rank left, else all that Slurm knows."""
    known = {"job": job, "slurm_state": ended.name}
    if ended.name in _DECIDED:
        reason = f" ({ended.reason})" if ended.reason else ""
        return {"cause": f"Slurm job {job} {_DECIDED[ended.name]}{reason}", **known}
    cause = first_cause(run, [])
    if "step" in cause:  # that is of ranks, also where none of them is to blame
        memory = "; Slurm says that the job was out of memory" if ended.name == "OUT_OF_MEMORY" else ""
        return {**cause, "cause": f"{cause['cause']}{memory}", **known}
    problem = folder_problem(run.folder)
    if problem is not None:
        return {"cause": f"Slurm job {job} ended as {ended.name}: {problem}", **known}
    if (run.folder / QUEUE_AGAIN).exists():
        again = "the study's own command, with --retry-failed" if run.spec().part else f"lockstep run --resume {run.id}"
        go_on = f"go on from its checkpoint: {again}"
        return {"cause": f"Slurm job {job} gave way and did not come back ({_last_words(run)}): {go_on}", **known}
    return {"cause": f"Slurm job {job} {_without_account(run, ended)}", **known}


def _without_account(run: Run, ended: JobState) -> str:
    shared = "is the run folder on a file system that all nodes share?"
    if ended.name == "VANISHED":
        return "is no longer known to Slurm, and no rank says how it ended"
    if ended.name == "COMPLETED":
        return f"ended, but no results are in the run folder: {shared}"
    if ended.exit_code.endswith(":53"):  # Slurm's own number for output that a node could not open
        return f"could not write {run.folder / 'launcher.log'}: {shared}"
    details = ", ".join(
        part for part in (ended.reason, f"exit code {ended.exit_code}" if ended.exit_code else "") if part
    )
    return f"ended as {ended.name} ({details}): {_last_words(run)}"


def _last_words(run: Run) -> str:
    """Which task srun lost first, if a signal ended it; else the last line that the script or a rank's start-up wrote."""
    logs = [run.folder / "launcher.log", *run.folder.glob("agent-*.log"), *run.folder.glob("ranks/*/launcher.log")]
    texts = [log.read_text(errors="replace") for log in logs if log.is_file()]
    lost = re.search(r"srun: error: (\S+: tasks? \S+): (?!Exited)(.+)", texts[0] if texts else "")
    if lost:
        return f"{lost.group(1)}: {lost.group(2)}"
    lines = [line for text in texts if (line := last_line(text))]
    return lines[-1] if lines else "nothing was written to launcher.log"
