"""The sbatch script of a run: one text, which a batch job and `bash` inside an allocation both run.

Every value of the user's is checked against a pattern or quoted; only slurm.setup is shell, because that is what it is for.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

from lockstep.errors import InputError
from lockstep.launch import mpirun
from lockstep.launch.base import default_environment, monitor_argv, thread_environment
from lockstep.placement import Placement, Slurm, ranks_per_host
from lockstep.process import PARENT
from lockstep.run import QUEUE_AGAIN, Run, Spec, writing

NAME = "job.sbatch"
# Runs that share one allocation share its job id; this keeps their meeting points apart.
PORT_SHIFT = "LOCKSTEP_PORT_SHIFT"
# Where a short job writes its number and the names of its nodes, as soon as it has them.
GRANTED, NODES = "job", "nodes"
# Below the range from which Linux hands out ports by itself (32768 and up).
FIRST_PORT, PORTS = 20000, 10000

_PATTERNS = {
    "partition": (r"[A-Za-z0-9_.,+-]+", "debug"),
    "account": (r"[A-Za-z0-9_.@+-]+", "physics"),
    "time": (r"\d+(-\d+)?(:\d+){0,2}", "00:30:00"),
    "gres": (r"[A-Za-z0-9_.:,=-]+", "gpu:4"),
    "mpi": (r"[A-Za-z0-9_]+", "pmi2"),
}


def check(placement: Placement) -> None:
    """Refuse what would mean something else in the script than the user wrote."""
    for key, (pattern, example) in _PATTERNS.items():
        value = getattr(placement.slurm, key)
        if value is not None and not re.fullmatch(pattern, value):
            raise InputError(f"slurm.{key}={value!r} is not what Slurm takes here, for example slurm.{key}={example}")
    for line in placement.slurm.directives:
        if not line.startswith("-") or not line.isprintable():
            raise InputError(f"slurm.directives: {line!r} is not one sbatch option, for example --exclusive")
    by = placement.slurm.ranks_by
    if placement.slurm.requeue and by != "srun":
        raise InputError(
            f"slurm.requeue=true: {by} ends its ranks before they can keep a checkpoint: slurm.ranks_by=srun"
        )
    _check_grace(placement.slurm)
    if placement.slurm.mpi and by != "srun":
        raise InputError(f"slurm.mpi={placement.slurm.mpi} is an option of srun: leave it out, or slurm.ranks_by=srun")


def _check_grace(slurm: Slurm) -> None:
    """A job that is told to leave as soon as it starts would queue again and again."""
    limit_s = _seconds(slurm.time or "0")
    if slurm.requeue and 0 < limit_s <= slurm.grace:  # 0 is no limit
        raise InputError(
            f"slurm.grace={slurm.grace}: slurm.time={slurm.time} is not longer than these seconds, so the job would queue again as soon as "
            "it starts: give it more with slurm.time, or state a smaller slurm.grace"
        )


def _seconds(limit: str) -> int:
    """Of a time limit as Slurm reads it: MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS, DAYS-HOURS, DAYS-HOURS:MINUTES, …"""
    days, dash, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if not dash and len(parts) < 3:
        parts = [0, *parts]
    hours, minutes, seconds = [*parts, 0, 0][:3]
    return int(days or 0) * 86_400 + hours * 3600 + minutes * 60 + seconds


def text(spec: Spec, folder: Path, worker: str | None = None) -> str:
    """The whole script. `worker`: the module of a short job's ranks (launch/pool.py), in place of one that trains."""
    check(spec.placement)
    if not str(folder).isprintable():
        raise InputError(f"--runs {str(folder)!r}: a path for Slurm has no line breaks or control characters")
    parts = [
        ["#!/bin/bash", *(f"#SBATCH {words}" for words in _directives(spec, folder))],
        ["set -e", *spec.placement.slurm.setup],
        _environment(spec),
        _MEETING_POINT,
    ]
    if worker:
        names = f'scontrol show hostnames "$SLURM_JOB_NODELIST" > {shlex.quote(str(folder / NODES))}'
        parts.append([names, f'echo "$SLURM_JOB_ID" > {shlex.quote(str(folder / GRANTED))}'])
        return "\n\n".join("\n".join(part) for part in parts) + f"\nexec {_short_ranks(spec, folder, worker)}\n"
    parts.append(["# The job ends as its ranks end, and ranks that lost one of them are ended."])
    ranks = _ranks(spec, folder)
    end = _queued_again(ranks, folder) if spec.gives_way else f"exec {ranks}"
    return "\n\n".join("\n".join(part) for part in parts) + f"\n{end}\n"


def _queued_again(ranks: str, folder: Path) -> str:
    """Ahead of its time limit a job asks for another turn. What Slurm ends by itself, it queues again by itself."""
    mark = shlex.quote(str(folder / QUEUE_AGAIN))
    running = "scontrol -o show job \"$SLURM_JOB_ID\" | grep -q 'JobState=RUNNING '"
    return "\n".join(
        [
            # Signs of life of an earlier turn would be taken for those of ranks that stand still.
            f"rm -f {mark} {shlex.quote(str(folder))}/ranks/*/status.json",
            "code=0",
            f"{ranks} || code=$?",
            f"if [ -e {mark} ] && {running}; then",
            '    scontrol requeue "$SLURM_JOB_ID"',
            "fi",
            'exit "$code"',
        ]
    )


def write(run: Run, spec: Spec) -> Path:
    """Put the script into the run folder."""
    path = run.folder / NAME
    with writing(run.folder):
        path.write_text(text(spec, run.folder))
    return path


def resources(spec: Spec) -> list[str]:
    """What sbatch and salloc are asked for alike."""
    return [_job_name(spec.id), *_asked(spec)]


def _directives(spec: Spec, folder: Path) -> list[str]:
    return [*resources(spec), f"--output={_directive_path(folder / 'launcher.log')}", *_handling(spec)]


def _job_name(name: str) -> str:
    return f"--job-name={re.sub(r'[^A-Za-z0-9_.-]', '-', name)}"


def asked_alike(one: Spec, other: Spec) -> bool:
    """Whether two jobs ask for the same, and so can be tasks of one array."""
    return [*_asked(one), *_handling(one)] == [*_asked(other), *_handling(other)]


def array(name: str, spec: Spec, folders: list[Path], at_once: int) -> str:
    """The script of an array: each task runs the script of its own run, and writes where a job of its own would."""
    listed = " ".join(shlex.quote(str(folder)) for folder in folders)
    words = [_job_name(name), *_asked(spec), f"--array=0-{len(folders) - 1}%{at_once}", "--output=/dev/null"]
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {line}" for line in (*words, *_handling(spec))),
            "",
            f"folders=({listed})",
            'folder="${folders[$SLURM_ARRAY_TASK_ID]}"',
            f'exec bash "$folder/{NAME}" >> "$folder/launcher.log" 2>&1',
            "",
        ]
    )


def _asked(spec: Spec) -> list[str]:
    """Nodes, cores, and whatever else the cluster is asked for."""
    slurm = spec.placement.slurm
    words = _shape(spec.placement)
    words += [f"--{key}={value}" for key in ("partition", "account", "time") if (value := getattr(slurm, key))]
    gres = slurm.gres or _default_gres(spec.placement)
    return words + ([f"--gres={gres}"] if gres else [])


def _handling(spec: Spec) -> list[str]:
    """What Slurm does with the job, and the user's own lines."""
    slurm = spec.placement.slurm
    # A run is one folder: a job that Slurm starts a second time would write over what the first one measured, unless it goes on from there.
    again = ["--requeue", f"--signal=USR1@{slurm.grace}"] if spec.gives_way else ["--no-requeue"]
    return ["--open-mode=append", *again, "--export=ALL", *slurm.directives]


def _shape(placement: Placement) -> list[str]:
    """Hosts x tasks x cores. With torchrun one task of a host holds the cores of all its ranks."""
    local, threads = ranks_per_host(placement), placement.threads or 1
    tasks, cpus = (1, local * threads) if placement.slurm.ranks_by == "torchrun" else (local, threads)
    return [f"--nodes={placement.hosts}", f"--ntasks-per-node={tasks}", f"--cpus-per-task={cpus}"]


def _default_gres(placement: Placement) -> str | None:
    """One GPU a rank, unless the user asks for GPUs in words of his own."""
    asked = any("gpu" in line or "gres" in line for line in placement.slurm.directives)
    return f"gpu:{ranks_per_host(placement)}" if placement.device == "cuda" and not asked else None


def _directive_path(path: Path) -> str:
    """A path as sbatch reads it from a directive: a word, in which % starts a pattern."""
    return shlex.quote(str(path).replace("%", "%%"))


def _environment(spec: Spec) -> list[str]:
    variables = thread_environment(spec.placement)
    if spec.placement.slurm.ranks_by == "mpirun":
        variables |= mpirun.library_environment(mpirun.choose(spec.placement), spec.placement)
        if spec.options.turns:  # the srun by which mpirun reaches the nodes cannot be told
            variables["SLURM_OVERLAP"] = "1"
    lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    defaults = default_environment(spec.placement)
    if spec.placement.backend == "nccl":
        defaults["NCCL_DEBUG"] = "WARN"
    lines += [f'export {name}="${{{name}:-{value}}}"' for name, value in defaults.items()]
    return [*lines, f"unset {PARENT}  # it names a process of the machine that submitted"]


_MEETING_POINT = [
    "# Ranks meet on the first node; a node's name need not be a host's name, its address is.",
    'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
    'if ! getent hosts "$first" > /dev/null; then',
    "    first=$(scontrol -o show node \"$first\" | grep -oE 'NodeAddr=[^ ]+' | cut -d= -f2)",
    "fi",
    'export MASTER_ADDR="$first"',
    f"export MASTER_PORT=$(( {FIRST_PORT} + (SLURM_JOB_ID + ${{{PORT_SHIFT}:-0}}) % {PORTS} ))",
]


def _ranks(spec: Spec, folder: Path) -> str:
    """The command that starts the ranks. srun does not take over what sbatch was told, so it is told again."""
    placement = spec.placement
    if placement.slurm.ranks_by == "mpirun":
        return _mpirun(placement, monitor_argv(folder))
    by_torchrun = placement.slurm.ranks_by == "torchrun"
    tasks = placement.hosts if by_torchrun else placement.ranks
    # Each node writes its own tasks' files: a pipe to srun would be held open by whatever a task leaves behind.
    output = Path(str(folder).replace("%", "%%")) / ("agent-%t.log" if by_torchrun else "ranks/%4t/launcher.log")
    ways = [f"--ntasks={tasks}", "--distribution=block", "--kill-on-bad-exit=1"]
    ways += [f"--mpi={placement.slurm.mpi}"] if placement.slurm.mpi else []
    # Contenders of a race share the cores of their allocation, and take turns on them.
    ways += ["--overlap"] if spec.options.turns else []
    lines = [shlex.join(words) for words in (["srun", *_shape(placement)], ways)]
    lines += [shlex.join([f"--output={output}", "--open-mode=append"])]
    if by_torchrun:
        # Only the task itself knows SLURM_NODEID, so a shell in the task fills it in.
        lines += [f"bash -c '{_agent(placement)}'", shlex.join(["lockstep", sys.executable, str(folder)])]
    else:
        lines += [shlex.join(monitor_argv(folder))]
    return " \\\n    ".join(lines)


def _mpirun(placement: Placement, ranks: list[str]) -> str:
    """mpirun on the job's first node, which reaches the others by Slurm."""
    return " \\\n    ".join(shlex.join(words) for words in (mpirun.command(mpirun.choose(placement), placement), ranks))


def _short_ranks(spec: Spec, folder: Path, worker: str) -> str:
    """A node that fails does not end the others, and what it says goes to whoever started us: it may not see our folder."""
    placement = spec.placement
    if placement.slurm.ranks_by == "mpirun":
        return _mpirun(placement, [sys.executable, "-m", worker, str(folder)])
    by_torchrun = placement.slurm.ranks_by == "torchrun"
    tasks = placement.hosts if by_torchrun else placement.ranks
    ways = [f"--ntasks={tasks}", "--distribution=block", "--kill-on-bad-exit=0", "--overlap", "--label"]
    ways += [f"--mpi={placement.slurm.mpi}"] if placement.slurm.mpi else []
    lines = [shlex.join(words) for words in (["srun", *_shape(placement)], ways)]
    if by_torchrun:
        lines += [f"bash -c '{_agent(placement, worker)}'", shlex.join(["lockstep", sys.executable, str(folder)])]
    else:
        lines += [shlex.join([sys.executable, "-m", worker, str(folder)])]
    return " \\\n    ".join(lines)


def _agent(placement: Placement, worker: str = "lockstep.worker") -> str:
    """One torchrun of a node, for `bash -c … lockstep PYTHON FOLDER`."""
    return (
        'exec "$1" -m lockstep.launch.agent "$2" "$SLURM_NODEID" '
        f"--nnodes={placement.hosts} --nproc-per-node={ranks_per_host(placement)} --max-restarts=0 "
        '--node-rank="$SLURM_NODEID" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" '
        f'-m {worker} "$2"'
    )
