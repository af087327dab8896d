"""`lockstep doctor`: what this machine can do, what is missing, and how to get it."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from pathlib import Path
from typing import Any

import click

from lockstep.cli.output import console, json_option, note, print_json, styled
from lockstep.cli.run import runs_option

EPILOG = """\b
Examples:
  lockstep doctor
  lockstep doctor --json
"""

COLOURS = {"ok": "green", "missing": "yellow", "problem": "red"}


@click.command("doctor", epilog=EPILOG)
@runs_option
@json_option
def command(runs: Path | None, as_json: bool) -> None:
    """Say what this machine can do, what is missing and how to get it."""
    if not as_json:
        note("looking around and trying what this machine has not shown yet (torch takes two seconds to start) …")
    findings = [*_formats(), *_machine(), *_torch(), *_launchers(), *_data(), *_folders(runs)]
    areas = list(dict.fromkeys(finding["area"] for finding in findings))
    findings.sort(key=lambda finding: areas.index(finding["area"]))
    if as_json:
        print_json(findings)
        return
    out = console()
    area = None
    for finding in findings:
        if finding["area"] != area:
            area = finding["area"]
            out.print(styled((finding["area"], "bold")))
        fix = (f"  → {finding['fix']}" if finding["fix"] else "", "dim")
        colour = COLOURS[finding["state"]]
        out.print(styled("  ", (f"{finding['state']:<8}", colour), f" {finding['what']}", fix), soft_wrap=True)


def _finding(area: str, state: str, what: str, fix: str = "") -> dict[str, Any]:
    return {"area": area, "state": state, "what": what, "fix": fix}


def _formats() -> list[dict[str, Any]]:
    """Number formats, the answer first: what works, what does not, and what was done about it."""
    from lockstep.machine import facts, formats, trial

    try:
        known = facts.ask()
    except trial.NotKnown as error:
        return [_finding("number formats", "problem", f"not known: {error}", "pip install torch")]
    problems = {kind: formats.problem(kind, known) for kind in formats.FORMATS}
    found = [_finding("number formats", "ok" if not all(problems.values()) else "problem", formats.works_line(known))]
    for kind, wrong in problems.items():
        if wrong:
            found.append(_finding("number formats", "problem", wrong, f"runs that need {kind} are refused"))
    cap = formats.cap_line(known)
    if cap:
        found.append(_finding("number formats", "ok", cap))
    settings = [f"{name}={value}" for name, value in known.machine.items() if name in facts.VARIABLES]
    if settings:
        found.append(_finding("number formats", "ok", f"tried under your own {' '.join(settings)}"))
    found.append(
        _finding(
            "number formats",
            "ok",
            f"{'kept in' if facts.path().exists() else 'cannot be kept in'} {facts.path()}; it took {known.seconds:.1f} s",
        )
    )
    return found


def _machine() -> list[dict[str, Any]]:
    from lockstep.machine.cores import measure
    from lockstep.measure.environment import machine

    seen = machine()
    memory = f"{seen['memory_bytes'] / 2**30:.1f} GiB" if seen["memory_bytes"] else "unknown"
    cores, load = seen["cores_usable"], seen["load_1min"] or 0.0
    found = [
        _finding(
            "machine",
            "ok",
            f"{seen['cpu']}, {cores} of {seen['cores_machine']} cores usable, {memory}, {seen['system']}",
        ),
    ]
    if load > 0.5 * cores:
        found.append(
            _finding("machine", "problem", f"load {load:.1f} on {cores} cores", "timings will be noisy: end other work")
        )
    else:
        found.append(_finding("machine", "ok", f"load {load:.1f}: quiet enough to measure"))
    had = measure()
    enough = had.had > 0.8 * had.usable and had.stolen < 0.02
    found.append(
        _finding(
            "machine",
            "ok" if enough else "problem",
            f"{had.had:.1f} cores' worth of time when all {had.usable} are asked for, {had.stolen:.0%} stolen by the hypervisor",
            "" if enough else "other work, a quota or a busy host takes the rest: timings will be noisy",
        )
    )
    if hasattr(os, "sched_setaffinity"):
        found.append(_finding("machine", "ok", "ranks can be pinned to cores"))
    else:
        found.append(_finding("machine", "missing", "ranks cannot be pinned on this system", "timings may vary more"))
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads:
        found.append(
            _finding("machine", "ok", f"OMP_NUM_THREADS={threads} in your shell; runs set it themselves, from threads=")
        )
    found.append(
        _finding(
            "machine",
            "ok",
            f"threads per rank: {cores} with 1 rank, {max(1, cores // 2)} with 2, {max(1, cores // 4)} with 4",
        )
    )
    return found


def _torch() -> list[dict[str, Any]]:
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        return [_finding("torch", "problem", f"torch cannot be imported: {error}", "pip install torch")]
    found = [
        _finding(
            "torch", "ok", f"torch {torch.__version__}, CPU kernels for {torch.backends.cpu.get_cpu_capability()}"
        ),
        _finding("backends", "ok" if dist.is_gloo_available() else "missing", "gloo (CPU)"),
    ]
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        found.append(_finding("torch", "ok", f"CUDA {torch.version.cuda}: {names}"))
    else:
        reason = "torch is a CPU build" if torch.version.cuda is None else "no GPU is visible"
        found.append(_finding("torch", "missing", f"CUDA: {reason}", "device=cpu works everywhere"))
    if dist.is_nccl_available() and torch.cuda.is_available():
        found.append(_finding("backends", "ok", "nccl (CUDA)"))
    else:
        found.append(_finding("backends", "missing", "nccl (CUDA only)", "use backend=gloo"))
    has_mpi = importlib.util.find_spec("mpi4py") is not None
    found.append(
        _finding(
            "backends", "ok" if has_mpi else "missing", "mpi (CPU)", "" if has_mpi else "pip install 'lockstep[mpi]'"
        )
    )
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    found.append(_finding("backends", "ok" if x86 else "missing", "shm (CPU, x86)", "" if x86 else "use backend=gloo"))
    return found


def _launchers() -> list[dict[str, Any]]:
    from lockstep.launch import emulate, mpirun

    found = [_finding("launchers", "ok", "single, spawn")]
    has_torch = importlib.util.find_spec("torch") is not None
    found.append(
        _finding("launchers", "ok" if has_torch else "missing", "torchrun", "" if has_torch else "pip install torch")
    )
    kinds = list(dict.fromkeys(f"{mpi.kind} {'.'.join(map(str, mpi.version))}" for mpi in mpirun.installed()))
    if kinds:
        found.append(_finding("launchers", "ok", f"mpirun: {', '.join(kinds)}"))
    else:
        found.append(_finding("launchers", "missing", "mpirun", "pip install 'lockstep[mpi]'"))
    if shutil.which("sbatch"):
        found.append(_finding("launchers", "ok", "slurm (sbatch is there; 'sinfo' says whether a cluster answers)"))
    else:
        found.append(_finding("launchers", "missing", "slurm", "on a cluster's login node, or install slurm-client"))
    problem = emulate.problem()
    found.append(_finding("launchers", "missing" if problem else "ok", "emulated hosts", problem or ""))
    return found


def _data() -> list[dict[str, Any]]:
    from lockstep.data import known_data
    from lockstep.machine.cache import cache_folder

    found = []
    for entry in known_data():
        if (cache_folder() / entry.name / "meta.json").exists():
            found.append(_finding("data", "ok", f"{entry.name}: in {cache_folder() / entry.name}"))
        elif entry.name.startswith("embedded"):
            found.append(_finding("data", "ok", f"{entry.name}: made on first use, no network needed"))
        else:
            found.append(_finding("data", "missing", entry.name, f"lockstep data fetch {entry.name}"))
    return found


def _folders(runs: Path | None) -> list[dict[str, Any]]:
    from lockstep.run import runs_root

    root = runs_root(runs).absolute()
    existing = next(p for p in (root, *root.parents) if p.exists())
    free = shutil.disk_usage(existing).free / 2**30
    if not os.access(existing, os.W_OK):
        return [
            _finding("runs", "problem", f"{root} is not writable", "choose another place with --runs or LOCKSTEP_RUNS")
        ]
    state, fix = ("ok", "") if free > 1 else ("problem", "free some space, or choose another place with --runs")
    return [_finding("runs", state, f"{root}, {free:.1f} GiB free", fix)]
