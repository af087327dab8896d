"""From a recipe and a placement to a finished run: check, plan, make the folder, start the ranks, watch them."""

from __future__ import annotations

import shutil
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec

from lockstep import models
from lockstep.data import check_name, open_data
from lockstep.errors import InputError
from lockstep.launch import emulate, emulated, mpirun, slurm, spawn, torchrun
from lockstep.launch.auto import choose_backend
from lockstep.launch.base import Start
from lockstep.launch.supervise import Progress, supervise
from lockstep.measure.environment import version_of
from lockstep.own_loop.script import script_recipe
from lockstep.placement import Placement, one_command_per_host, plan
from lockstep.recipe import Recipe
from lockstep.resolve import resolve
from lockstep.run import FolderExists, Options, Run, Spec, new_id, runs_root, write_atomic

# How long a host waits for another one that is making the run folder they share.
JOIN_S = 10.0
LAUNCHERS = {
    "single": spawn.starts,
    "spawn": spawn.starts,
    "torchrun": torchrun.starts,
    "mpirun": mpirun.starts,
    "slurm": slurm.starts,
}


def prepare(
    recipe: Recipe,
    placement: Placement,
    options: Options | None = None,
    runs: Path | None = None,
    name: str | None = None,
) -> tuple[Path, Spec]:
    """Check everything that can be checked before a process starts. Returns the folder the run will have, and its spec."""
    options = options or Options()
    if placement.max_restarts and options.checkpoint_every is None:
        options = msgspec.structs.replace(options, checkpoint_every=1)
    if options.script:
        recipe = script_recipe(recipe, placement, options)
    else:
        models.check_name(recipe.model)
        check_name(recipe.data)
    placement, why_backend = (placement, "") if options.script else choose_backend(recipe, placement)
    recipe, placement = resolve(recipe, placement)
    if name is not None and (not name or name.startswith(".") or "/" in name or "\0" in name):
        raise InputError(f"--name {name!r}: a run's name is one plain word, without '/' and not starting with '.'")
    identity = name or new_id(recipe, placement)
    folder = (runs_root(runs) / identity).absolute()
    train_samples, test_samples, origin = _count(recipe, options, early_data(folder))
    spec = Spec(
        id=identity,
        created=time.time(),
        lockstep=version_of("lockstep") or "unknown",
        recipe=recipe,
        placement=placement,
        plan=plan(recipe, placement, train_samples, test_samples),
        options=options,
        data_origin=origin,
        why_backend=why_backend,
    )
    command = [start.words() for start in starts_of(spec, folder, host_index=0)]
    return folder, msgspec.structs.replace(spec, command=command)


def _count(recipe: Recipe, options: Options, scratch: Path) -> tuple[int, int, str]:
    """Fetch the data if need be (once, before any rank starts) and count it."""
    if options.script:
        return recipe.global_batch, 1, f"the script {options.script}"  # its data are its own business
    root = Path(options.data_root) if options.data_root else None
    data = open_data(recipe.data, root, scratch=scratch)
    return len(data.train_labels), len(data.test_labels), data.origin


def early_data(folder: Path) -> Path:
    """Where a user's own data set is laid out before the run folder is there; `execute` moves it in."""
    return folder.parent / f".{folder.name}.data"


def discard(folder: Path) -> None:
    """Forget what `prepare` laid out, where the run is not going to start."""
    shutil.rmtree(early_data(folder), ignore_errors=True)


def starts_of(spec: Spec, folder: Path, host_index: int) -> list[Start]:
    """The processes that one host starts; for emulated hosts, those of all of them as they are planned."""
    if spec.placement.emulated:
        return emulated.starts(spec, folder, emulate.planned(spec.placement))
    return LAUNCHERS[spec.placement.launcher](spec, folder, host_index)


def execute(folder: Path, spec: Spec, host_index: int = 0, progress: Progress | None = None) -> Run:
    """Run it. Returns the finished run, or raises the one-line error that says which rank failed and why."""
    if not 0 <= host_index < spec.placement.hosts:
        raise InputError(
            f"--host-index {host_index}: hosts={spec.placement.hosts} are numbered 0 to {spec.placement.hosts - 1}"
        )
    if host_index and not one_command_per_host(spec.placement):
        raise InputError(f"--host-index {host_index}: one command starts all of these hosts: leave it out")
    try:
        if host_index == 0:
            torchrun.check_port(spec)
        with emulate.network(spec.placement) if spec.placement.emulated else nullcontext() as network:
            run = _folder_for(folder, spec)
            if early_data(folder).exists() and not (folder / "data").exists():
                early_data(folder).rename(folder / "data")
            if spec.placement.launcher == "slurm":
                slurm.follow(run, spec, progress)
                return run
            if network is not None:
                write_atomic(folder / "network.json", network.document())
                starts = emulated.starts(spec, folder, network)
            else:
                starts = starts_of(spec, folder, host_index)
            supervise(run, spec, starts, host_index, progress)
    finally:
        discard(folder)
        shutil.rmtree(folder / "data", ignore_errors=True)
    return run


def _folder_for(folder: Path, spec: Spec) -> Run:
    """Make the run folder; of several hosts that share a file system, one makes it and the others join."""
    try:
        return Run.create(folder.parent, spec)
    except FolderExists:
        if not one_command_per_host(spec.placement):
            raise
    until = time.monotonic() + JOIN_S
    while not (folder / "run.json").exists() and time.monotonic() < until:
        time.sleep(0.05)
    run = Run.open(folder)
    there = run.spec()
    # Hosts may differ in their number of cores, and so in threads; in nothing else.
    same = msgspec.structs.replace(there.placement, threads=spec.placement.threads) == spec.placement
    if there.recipe != spec.recipe or not same:
        raise InputError(f"run folder {folder} holds another recipe or placement: choose another --name")
    return run


def train(
    recipe: Recipe | None = None,
    placement: Placement | None = None,
    *,
    runs: Path | str | None = None,
    name: str | None = None,
    data_root: Path | str | None = None,
    **options: Any,
) -> Run:
    """Train a recipe on a placement, in processes of its own, and return the finished run.

    >>> import lockstep
    >>> run = lockstep.train(lockstep.Recipe(global_batch=256, epochs=1), lockstep.Placement(ranks=2))  # doctest: +SKIP
    >>> run.summary()["test_accuracy"]  # doctest: +SKIP
    """
    chosen = Options(data_root=str(data_root) if data_root else None, **options)
    folder, spec = prepare(recipe or Recipe(), placement or Placement(), chosen, Path(runs) if runs else None, name)
    return execute(folder, spec)
