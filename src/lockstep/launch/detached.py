"""Runs that go on without the command that started them: hand one to the cluster and leave it, or go back to one and follow it."""

from __future__ import annotations

import time

from lockstep.errors import InputError, LockstepError, RunCancelled, RunFailed, RunLeft
from lockstep.launch.cause import failure
from lockstep.launch.ending import signals_as_interrupt
from lockstep.launch.execution import clear_up
from lockstep.launch.slurm import launcher as slurm
from lockstep.launch.supervise import PROGRESS_S, Progress, Reporter
from lockstep.run import OVER, Run, Spec


def check(spec: Spec) -> None:
    """Refuse what would end with this command."""
    if spec.placement.launcher != "slurm":
        raise InputError(
            f"--detach: launcher={spec.placement.launcher} ends with this command, a Slurm job does not: launcher=slurm, or 'nohup lockstep run … &'"
        )
    if job := slurm.allocation():
        raise InputError(
            f"--detach: this is inside Slurm job {job}, and its ranks end with it: leave --detach out, or unset SLURM_JOB_ID to submit a job"
        )
    slurm.check_commands("sbatch")


def follow(run: Run, progress: Progress | None) -> None:
    """Follow a run to its end, whoever started it. Raises how it ended, if it is not done."""
    if slurm.submitted(run):
        try:
            if (
                run.recorded_status()["state"] not in OVER
            ):  # silent ranks may be those of a job that has ended: Slurm knows
                slurm.rejoin(run, progress)
        except (RunCancelled, RunLeft):
            raise  # it goes on
        except LockstepError:
            clear_up(run)
            raise
        clear_up(run)
    else:
        _look_on(run, progress)
    status = run.status()
    if status["state"] != "done":
        raise failure(run, status) if status["state"] == "failed" else RunFailed(f"run {run.id} is {status['state']}")


def _look_on(run: Run, progress: Progress | None) -> None:
    """At a run that another command supervises."""
    if run.status()["state"] == "planned":
        raise InputError(f"run {run.id} was planned and never started: there is nothing to follow")
    report = Reporter(run, run.spec(), progress)
    try:
        with signals_as_interrupt():
            while run.status()["state"] not in OVER:
                report()
                time.sleep(PROGRESS_S)
    except KeyboardInterrupt:
        raise RunCancelled(f"no longer following: the run goes on; go back to it: lockstep follow {run.id}") from None
    report()
