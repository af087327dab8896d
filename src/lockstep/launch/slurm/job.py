"""One Slurm job: handing it in, asking how it stands, taking it back. Each is one call of a Slurm command."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import InputError
from lockstep.launch.slurm import script
from lockstep.run import Run, Spec, write_atomic, writing
from lockstep.text import last_line

RECORD, ARRAY = "job.json", "array.sbatch"
LOOK_S = 0.5
# A job whose ranks have ended may take a while to leave its nodes; what does not go, Slurm kills after its KillWait, as a rule 30 s.
LEAVE_S = 45.0
COMMAND_S = 60.0

ENDED = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "PREEMPTED",
    "OUT_OF_MEMORY",
    "BOOT_FAIL",
    "DEADLINE",
    "REVOKED",
    "VANISHED",
)
# Which option to look at when sbatch refuses; the first that its message mentions.
_FIXES = {
    "partition": "change slurm.partition ('sinfo' lists partitions)",
    "account": "change slurm.account",
    "time limit": "change slurm.time",
    "generic resource": "change slurm.gres",
    "node": "change hosts, ranks or threads ('sinfo -Nl' lists what nodes have)",
    "controller": "is SLURM_CONF right, and is slurmctld running?",
    "configuration source": "set SLURM_CONF, or run this on a machine of the cluster",
}


@dataclass(frozen=True)
class JobState:
    """What Slurm says of a job. VANISHED: it knows it no longer; UNREACHABLE: it does not answer (both our words)."""

    name: str
    reason: str = ""
    exit_code: str = ""
    """As Slurm writes it: exit code, colon, signal."""
    nodes: str = ""

    @property
    def ended(self) -> bool:
        return self.name in ENDED


def submit(run: Run, spec: Spec) -> str:
    """Write the script and hand it to sbatch. Returns the job's id; what sbatch refuses is the user's to fix."""
    job = _hand_in(script.write(run, spec), spec)
    _note(job, {job: run})
    return job


def submit_array(name: str, runs: list[tuple[Run, Spec]], at_once: int) -> list[str]:
    """Several runs that ask for the same, as one entry in Slurm's queue. Returns the id of each one's task: JOB_0, JOB_1, …"""
    for run, spec in runs:
        script.write(run, spec)
    first, spec = runs[0]
    path = first.folder / ARRAY
    with writing(first.folder):
        path.write_text(script.array(name, spec, [run.folder for run, _ in runs], at_once))
    job = _hand_in(path, spec)
    tasks = {f"{job}_{number}": run for number, (run, _) in enumerate(runs)}
    _note(job, tasks)
    return list(tasks)


def array_of(job: str) -> str:
    """The whole that a task is of; a job that is no array's task is its own."""
    return job.partition("_")[0]


def _note(job: str, runs: dict[str, Run]) -> None:
    try:
        for number, run in runs.items():
            write_atomic(run.folder / RECORD, {"job": number, "submitted": time.time()})
    except BaseException:  # Ctrl-C too
        cancel(job)  # nobody would know of it
        raise


def _hand_in(path: Path, spec: Spec) -> str:
    argv = ["sbatch", "--parsable", str(path)]
    # A session of its own: Ctrl-C must not end sbatch between the controller's yes and the id that we need for scancel.
    process = subprocess.Popen(
        argv,
        env=_environment(spec),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate()
    except BaseException:  # a closed terminal, too
        _cancel_submission(process)
        raise
    job = output.strip().partition(";")[0]  # ID, or ID;CLUSTER
    if process.returncode or not job.isdigit():
        raise InputError(refusal("sbatch", errors or output))
    return job


def _environment(spec: Spec) -> dict[str, str]:
    """sbatch takes SBATCH_* variables before the script's own lines; what the script states must win."""
    slurm = spec.placement.slurm
    ours = {"JOB_NAME", "OUTPUT", "ERROR", "OPEN_MODE", "REQUEUE", "NO_REQUEUE", "EXPORT", "WAIT"}
    ours |= {"SIGNAL"} if spec.gives_way else set()
    ours |= {"PARTITION"} if slurm.partition else set()
    ours |= {"ACCOUNT"} if slurm.account else set()
    ours |= {"TIMELIMIT"} if slurm.time else set()
    return {name: value for name, value in os.environ.items() if name not in {f"SBATCH_{word}" for word in ours}}


def _cancel_submission(process: subprocess.Popen[str]) -> None:
    """We are stopped while sbatch is at work: let it finish, and take back what it submitted."""
    try:
        output, _ = process.communicate(timeout=5)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        process.communicate()
        return
    job = output.strip().partition(";")[0]
    if job.isdigit():
        end(job)


def refusal(program: str, errors: str) -> str:
    """Why sbatch or salloc has not taken a job, in one line, and which option to look at."""
    lines = [line.partition("error: ")[2] or line for line in errors.strip().splitlines()] or ["no reason given"]
    fix = next((fix for word, fix in _FIXES.items() if word in errors.lower()), None)
    reason = lines[-1].removeprefix("Batch job submission failed: ").removeprefix("Job submit/allocate failed: ")
    return f"{program} refused the job: {reason}" + (f"; {fix}" if fix else "")


def state(job: str) -> JobState:
    """Where the job stands, from the controller, or from accounting where the controller has forgotten it."""
    shown = _ask("scontrol", "-o", "show", "job", job)
    if shown.returncode == 0:
        return JobState(*(_field(shown.stdout, key) for key in ("JobState", "Reason", "ExitCode", "NodeList")))
    if "Invalid job id" not in shown.stderr:
        return JobState("UNREACHABLE", last_line(shown.stderr) or "scontrol does not answer")
    if shutil.which("sacct"):
        kept = _ask("sacct", "-X", "-n", "-P", "-j", job, "-o", "State,Reason,ExitCode,NodeList")
        fields = kept.stdout.strip().split("|")
        if kept.returncode == 0 and len(fields) == 4:
            return JobState(fields[0].split()[0], *fields[1:])  # "CANCELLED by 1000"
    return JobState("VANISHED")


def cancel(job: str) -> None:
    """End the job; no error where it has ended by itself."""
    _ask("scancel", job)


def _ask(*argv: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_S, start_new_session=True
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(argv, 1, "", f"{argv[0]} gave no answer for {COMMAND_S:.0f} s")


def _field(text: str, key: str) -> str:
    found = re.search(rf"(?:^|\s){key}=(\S+)", text)
    return "" if found is None or found.group(1) in ("None", "(null)") else found.group(1)


def end(job: str) -> None:
    """Cancel the job and wait until its nodes are free of it; a second Ctrl-C ends the waiting."""
    cancel(job)
    with suppress(KeyboardInterrupt):
        _wait_until_gone(job)


def _wait_until_gone(job: str) -> None:
    until = time.monotonic() + LEAVE_S
    while time.monotonic() < until:
        current = state(job)
        if current.ended or current.name == "UNREACHABLE":
            return
        time.sleep(LOOK_S / 2)
    with suppress(OSError):
        print(f"Slurm is still ending job {job}: 'squeue -j {job}' shows it", file=sys.stderr, flush=True)
