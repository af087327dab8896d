"""How a Slurm job ended, from what Slurm decided, what its ranks left, and the last words of whatever started them."""

from __future__ import annotations

import re
import time
from dataclasses import asdict
from typing import Any, NoReturn

from lockstep.launch.cause import failure, first_cause
from lockstep.launch.slurm.job import LOOK_S, RECORD, JobState, end
from lockstep.launch.stall import Stalled
from lockstep.run import QUEUE_AGAIN, Run, folder_problem, read_json
from lockstep.text import last_line

# Files that other hosts wrote may take a while to show here: the results of a job that succeeded are worth more waiting.
SHOW_S, SHOW_FAILED_S = 10.0, 2.0


def conclude(run: Run, job: str, ended: JobState) -> None:
    record = {**(read_json(run.folder / RECORD) or {}), "ended": time.time(), **asdict(ended)}
    run.write_final(run.folder / RECORD, record)
    until = time.monotonic() + (SHOW_S if ended.name == "COMPLETED" else SHOW_FAILED_S)
    while run.recorded_status()["state"] != "done":
        accounts = any(True for pattern in ("failure", "exit") for _ in run.folder.glob(f"ranks/*/{pattern}.json"))
        # What the controller decided needs no account of a rank; else the folder may be some seconds behind.
        if ended.name in _DECIDED or accounts or time.monotonic() > until:
            fail(run, _cause(run, job, ended))
        time.sleep(LOOK_S / 2)


def end_stalled(run: Run, job: str, stalled: Stalled) -> None:
    """End a job whose ranks cannot go on, and write down why."""
    end(job)
    run.write_final_status("stalled", cause=stalled.cause, job=job, **stalled.named)


def fail(run: Run, cause: dict[str, Any]) -> NoReturn:
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
        return {"cause": f"Slurm job {job} gave way and did not come back ({last_words(run)}): {go_on}", **known}
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
    return f"ended as {ended.name} ({details}): {last_words(run)}"


def last_words(run: Run) -> str:
    """Which task srun lost first, if a signal ended it; else the last line that the script or a rank's start-up wrote."""
    logs = [run.folder / "launcher.log", *run.folder.glob("agent-*.log"), *run.folder.glob("ranks/*/launcher.log")]
    texts = [log.read_text(errors="replace") for log in logs if log.is_file()]
    lost = re.search(r"srun: error: (\S+: tasks? \S+): (?!Exited)(.+)", texts[0] if texts else "")
    if lost:
        return f"{lost.group(1)}: {lost.group(2)}"
    lines = [line for text in texts if (line := last_line(text))]
    return lines[-1] if lines else "nothing was written to launcher.log"
