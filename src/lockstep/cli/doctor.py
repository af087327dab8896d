"""`lockstep doctor`: what this machine can do, what is missing, and how to get it."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import click

from lockstep.cli.importing import import_torch
from lockstep.cli.options import json_option, runs_option
from lockstep.cli.output import console, next_step, note, print_json, styled
from lockstep.machine import shared_memory
from lockstep.machine.cache import cache_folder
from lockstep.machine.quota import ROOT
from lockstep.run import runs_root
from lockstep.units import counted

EPILOG = """\b
Examples:
  lockstep doctor
  lockstep doctor --json
"""

COLOURS = {"ok": "green", "missing": "yellow", "problem": "red"}


class Finding(NamedTuple):
    state: Literal["ok", "missing", "problem"]
    what: str
    fix: str = ""


@click.command("doctor", epilog=EPILOG)
@runs_option
@json_option
def command(runs: Path | None, as_json: bool) -> None:
    """Say what this machine can do, what is missing and how to get it."""
    if not as_json:
        note("looking around and trying what this machine has not shown yet (torch takes two seconds to start) …")
    areas = {
        "number formats": _formats(),
        "machine": _machine(),
        "torch": _torch(),
        "backends": _backends(),
        "launchers": _launchers(),
        "data": _data(),
        "packages": _packages(),
        "runs": _folders(runs),
    }
    if as_json:
        print_json([{"area": area, **found._asdict()} for area, findings in areas.items() for found in findings])
        return
    from lockstep.report.terminal import hanging

    out = console()
    for area, findings in areas.items():
        for number, found in enumerate(findings):
            if number == 0:
                out.print(styled((area, "bold")))
            fix = f"  → {found.fix}" if found.fix else ""
            hanging(out, (f"  {found.state:<8}", COLOURS[found.state]), found.what + fix, gap=1)
    next_step("lockstep demo (one recipe with one process and with two ranks, in a minute)")


def _there(there: bool, what: str, fix: str = "") -> Finding:
    return Finding("ok", what) if there else Finding("missing", what, fix)


def _formats() -> Iterator[Finding]:
    """Number formats, the answer first: what works, what does not, and what was done about it."""
    from lockstep.machine import facts, formats, trial

    try:
        known = facts.get()
    except trial.NotKnown as error:
        yield Finding("problem", f"not known: {error}", "pip install torch")
        return
    problems = {kind: formats.problem(kind, known) for kind in formats.FORMATS}
    yield Finding("problem" if all(problems.values()) else "ok", formats.works_line(known))
    for kind, wrong in problems.items():
        if wrong:
            yield Finding("problem", wrong, f"runs that need {kind} are refused")
    if cap := formats.cap_line(known):
        yield Finding("ok", cap)
    settings = [f"{name}={value}" for name, value in known.machine.items() if name in facts.VARIABLES]
    if settings:
        yield Finding("ok", f"tried under your own {' '.join(settings)}")
    kept = "kept in" if facts.path().exists() else "cannot be kept in"
    yield Finding("ok", f"{kept} {facts.path()}; it took {known.seconds:.1f} s")


def _machine(root: Path = ROOT) -> Iterator[Finding]:
    """`root` is where control groups are looked for."""
    from lockstep.machine.cores import measure
    from lockstep.measure.environment import machine

    seen = machine(root)
    memory = f"{seen['memory_bytes'] / 2**30:.1f} GiB" if seen["memory_bytes"] else "unknown"
    cores, load, quota = seen["cores_usable"], seen["load_1min"] or 0.0, seen["cpu_quota"]
    limit = f" (a control group allows {quota:g} cores' worth of time)" if quota is not None else ""
    usable = f"{cores} of {seen['cores_machine']} cores usable{limit}"
    yield Finding("ok", f"{seen['cpu']}, {usable}, {memory}, {seen['system']}")
    if load > 0.5 * cores:
        yield Finding(
            "problem", f"load {load:.1f} on {counted(cores, 'core')}", "timings will be noisy: end other work"
        )
    else:
        yield Finding("ok", f"load {load:.1f}: quiet enough to measure")
    share = measure()
    enough = share.granted > 0.8 * min(share.usable, quota or share.usable) and share.stolen < 0.02
    yield Finding(
        "ok" if enough else "problem",
        f"{share.granted:.1f} cores' worth of time when all {share.usable} are asked for, {share.stolen:.0%} stolen by the hypervisor",
        "" if enough else "other work or a busy host takes the rest: timings will be noisy",
    )
    if hasattr(os, "sched_setaffinity"):
        yield Finding("ok", "ranks can be pinned to cores")
    else:
        yield Finding("missing", "ranks cannot be pinned on this system", "timings may vary more")
    if threads := os.environ.get("OMP_NUM_THREADS"):
        yield Finding("ok", f"OMP_NUM_THREADS={threads} in your shell; runs set it themselves, from threads=")
    each = [max(1, cores // ranks) for ranks in (1, 2, 4)]
    yield Finding("ok", f"threads per rank: {each[0]} with 1 rank, {each[1]} with 2, {each[2]} with 4")


def _torch() -> Iterator[Finding]:
    try:
        import_torch()
        import torch
    except ImportError as error:
        yield Finding("problem", f"torch cannot be imported: {error}", "pip install torch")
        return
    yield Finding("ok", f"torch {torch.__version__}, CPU kernels for {torch.backends.cpu.get_cpu_capability()}")
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        yield Finding("ok", f"CUDA {torch.version.cuda}: {names}")
    else:
        reason = "torch is a CPU build" if torch.version.cuda is None else "no GPU is visible"
        yield Finding("missing", f"CUDA: {reason}", "device=cpu works everywhere")


def _backends() -> Iterator[Finding]:
    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        return
    yield _there(dist.is_gloo_available(), "gloo (CPU)")
    yield _there(dist.is_nccl_available() and torch.cuda.is_available(), "nccl (CUDA)", "use backend=gloo")
    yield _there(importlib.util.find_spec("mpi4py") is not None, "mpi (CPU)", "pip install 'lockstep-bench[mpi]'")
    reason = shared_memory.problem()
    yield _there(reason is None, f"shm (CPU): it {reason}" if reason else "shm (CPU)", "use backend=gloo")


def _launchers() -> Iterator[Finding]:
    from lockstep.launch import mpirun
    from lockstep.launch.emulated import network

    yield Finding("ok", "single, spawn")
    yield _there(importlib.util.find_spec("torch") is not None, "torchrun", "pip install torch")
    kinds = list(dict.fromkeys(f"{mpi.kind} {'.'.join(map(str, mpi.version))}" for mpi in mpirun.installed()))
    yield _there(bool(kinds), f"mpirun: {', '.join(kinds) or 'not installed'}", "pip install 'lockstep-bench[mpi]'")
    if shutil.which("sbatch"):
        yield Finding("ok", "slurm (sbatch is there; 'sinfo' says whether a cluster answers)")
    else:
        yield Finding("missing", "slurm", "on a cluster's login node, or install slurm-client")
    yield _there(importlib.util.find_spec("ray") is not None, "ray", "pip install 'lockstep-bench[ray]'")
    problem = network.problem()
    yield _there(not problem, "emulated hosts", problem or "")


def _data() -> Iterator[Finding]:
    from lockstep.data import known_data

    for entry in known_data():
        if (cache_folder() / entry.name / "meta.json").exists():
            yield Finding("ok", f"{entry.name}: in {cache_folder() / entry.name}")
        elif entry.name.startswith("embedded"):
            yield Finding("ok", f"{entry.name}: made on first use, no network needed")
        else:
            yield Finding("missing", entry.name, f"lockstep data fetch {entry.name}")


def _packages() -> Iterator[Finding]:
    """What other packages offer, each tried."""
    from lockstep.errors import InputError
    from lockstep.offered import GROUPS, offers

    for offer in (offer for kind in GROUPS for offer in offers(kind)):
        try:
            offer.load()
        except InputError as error:
            yield Finding("problem", str(error), f"update {offer.package}, or remove it")
        else:
            yield Finding("ok", f"{offer.kind} {offer.name}, of the package {offer.package}")


def _folders(runs: Path | None) -> Iterator[Finding]:

    root = runs_root(runs).absolute()
    existing = next(p for p in (root, *root.parents) if p.exists())
    free = shutil.disk_usage(existing).free / 2**30
    elsewhere = "choose another place with --runs"
    if not os.access(existing, os.W_OK):
        yield Finding("problem", f"{root} is not writable", f"{elsewhere} or LOCKSTEP_RUNS")
    elif free > 1:
        yield Finding("ok", f"{root}, {free:.1f} GiB free")
    else:
        yield Finding("problem", f"{root}, {free:.1f} GiB free", f"free some space, or {elsewhere}")
