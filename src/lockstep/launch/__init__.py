"""From a recipe and a placement to a finished run: check, plan, make the folder, start the ranks, watch them."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from lockstep import models
from lockstep.data import check_name, open_data
from lockstep.errors import InputError, LockstepError, RunCancelled
from lockstep.launch import emulate, emulated, mpirun, slurm, spawn, torchrun
from lockstep.launch.auto import choose_backend
from lockstep.launch.base import Start
from lockstep.launch.supervise import Progress, supervise
from lockstep.measure.environment import version_of
from lockstep.own_loop.script import script_recipe
from lockstep.placement import Placement, one_command_per_host, plan
from lockstep.recipe import Recipe
from lockstep.resolve import resolve
from lockstep.run import (
    DATA,
    ENDED,
    PLANNING,
    FolderExists,
    Options,
    Part,
    Run,
    Spec,
    folder_error,
    new_id,
    runs_root,
    write_atomic,
)
from lockstep.run import check_name as check_run_name
from lockstep.settings import checked

# How long a host waits for another one that is making the run folder they share: to see that it does, and until it is done,
# which may take it as long as its data.
SEEN_S, JOIN_S = 10.0, 600.0
LAUNCHERS = {
    "single": spawn.starts,
    "spawn": spawn.starts,
    "torchrun": torchrun.starts,
    "mpirun": mpirun.starts,
    "slurm": slurm.starts,
}


class _Draft(NamedTuple):
    """A run as far as it is known without its data."""

    folder: Path
    recipe: Recipe
    placement: Placement
    options: Options
    why_backend: str


def specify(
    recipe: Recipe,
    placement: Placement,
    options: Options | None = None,
    runs: Path | None = None,
    name: str | None = None,
) -> tuple[Path, Spec]:
    """What a run would be: the folder it would have, and its spec. Nothing is left on disk."""
    draft = _draft(recipe, placement, options, runs, name)
    with tempfile.TemporaryDirectory(prefix="lockstep-data-") as scratch:
        return draft.folder, _complete(draft, Path(scratch))


def prepare(
    recipe: Recipe,
    placement: Placement,
    options: Options | None = None,
    runs: Path | None = None,
    name: str | None = None,
    host_index: int | None = None,
    check: Callable[[Spec], None] | None = None,
    part: Part | None = None,
) -> tuple[Run, Spec]:
    """Check everything that can be checked before a process starts, and make the run's folder, as planned.

    The folder comes first: a user's own data set is laid out in it, and nobody else can have taken its name. Wrong input, found
    here or by `check`, leaves no folder behind.
    """
    draft = _draft(recipe, placement, options, runs, name)
    _check_host(draft.placement, host_index, name)
    if not host_index:
        torchrun.check_port(draft.placement)
    if draft.placement.emulated and (problem := emulate.problem()):
        raise InputError(problem)
    try:
        run = Run.claim(draft.folder)
    except FolderExists:
        if one_command_per_host(draft.placement):
            return _join(draft, host_index or 0, check)
        raise
    try:
        spec = msgspec.structs.replace(_complete(draft, run.folder / DATA), part=part)
        if check:
            check(spec)
        run.plan(spec)
        if one_command_per_host(spec.placement):
            _register_host(run, host_index or 0)
    except BaseException:
        run.remove()
        raise
    return run, spec


def _draft(
    recipe: Recipe, placement: Placement, options: Options | None, runs: Path | None, name: str | None
) -> _Draft:
    recipe, placement, options = checked(recipe), checked(placement), checked(options or Options())
    if placement.max_restarts and options.checkpoint_every is None:
        options = msgspec.structs.replace(options, checkpoint_every=1)
    if options.script:
        recipe = script_recipe(recipe, placement, options)
    else:
        models.check_name(recipe.model)
        check_name(recipe.data)
    placement, why_backend = (placement, "") if options.script else choose_backend(recipe, placement)
    recipe, placement = resolve(recipe, placement)
    if name is not None:
        check_run_name("--name ", name, "run")
    if name == "last":
        raise InputError("--name last: that word stands for the newest run: choose another")
    folder = (runs_root(runs) / (name or new_id(recipe, placement))).absolute()
    return _Draft(folder, recipe, placement, options, why_backend)


def _complete(draft: _Draft, scratch: Path) -> Spec:
    """The spec, with what follows from the data: the plan."""
    recipe, placement, options = draft.recipe, draft.placement, draft.options
    train_samples, test_samples, origin = _count(recipe, options, scratch)
    spec = Spec(
        id=draft.folder.name,
        created=time.time(),
        lockstep=version_of("lockstep") or "unknown",
        recipe=recipe,
        placement=placement,
        plan=plan(recipe, placement, train_samples, test_samples),
        options=options,
        data_origin=origin,
        why_backend=draft.why_backend,
    )
    command = [start.words() for start in starts_of(spec, draft.folder, host_index=0)]
    return msgspec.structs.replace(spec, command=command)


def _count(recipe: Recipe, options: Options, scratch: Path) -> tuple[int, int, str]:
    """Fetch the data if need be (once, before any rank starts) and count it."""
    if options.script:
        return recipe.global_batch, 1, f"the script {options.script}"  # its data are its own business
    root = Path(options.data_root) if options.data_root else None
    data = open_data(recipe.data, root, scratch=scratch)
    return len(data.train_labels), len(data.test_labels), data.origin


def _check_host(placement: Placement, host_index: int | None, name: str | None) -> None:
    hosts = placement.hosts
    if host_index is not None and not 0 <= host_index < hosts:
        raise InputError(f"--host-index {host_index}: hosts={hosts} are numbered 0 to {hosts - 1}")
    if not one_command_per_host(placement):
        if host_index:
            raise InputError(f"--host-index {host_index}: one command starts all of these hosts: leave it out")
    elif host_index is None or name is None:
        raise InputError(
            f"hosts={hosts}: every host starts its own command with the same --name and its own --host-index; "
            "--dry-run prints them"
        )


def _join(draft: _Draft, host_index: int, check: Callable[[Spec], None] | None) -> tuple[Run, Spec]:
    """Of several hosts that share a file system one makes the run's folder, and the others take their places in it.

    Each host has cores of its own, and may have a data cache of its own: both are looked at before its ranks start.
    """
    folder = draft.folder
    with tempfile.TemporaryDirectory(prefix="lockstep-data-") as scratch:
        here = _complete(draft, Path(scratch))
    if check:
        check(here)
    began = time.monotonic()
    while folder.exists() and not (folder / "run.json").exists():
        if time.monotonic() - began > (JOIN_S if (folder / PLANNING).exists() else SEEN_S):
            break
        time.sleep(0.05)
    run = Run.open(folder)
    there = run.spec()
    # Hosts may differ in their number of cores, and so in threads; in nothing else.
    same = msgspec.structs.replace(there.placement, threads=draft.placement.threads) == draft.placement
    if there.recipe != draft.recipe or not same:
        raise InputError(f"run folder {folder} holds another recipe or placement: choose another --name")
    state = run.status()["state"]
    if state in ENDED:
        raise FolderExists(f"run folder {folder} holds a run that has ended ({state}): choose another --name")
    _register_host(run, host_index)
    return run, msgspec.structs.replace(there, placement=draft.placement)


def _register_host(run: Run, host_index: int) -> None:
    """Each host of a run is there once: who finds the place taken has the wrong name or the wrong --host-index."""
    try:
        with (run.folder / f"host-{host_index}").open("x") as file:
            file.write(f"{platform.node()} {os.getpid()}\n")
    except FileExistsError:
        raise FolderExists(
            f"host {host_index} of run {run.folder} was started before: choose another --name, or another --host-index"
        ) from None


def starts_of(spec: Spec, folder: Path, host_index: int) -> list[Start]:
    """The processes that one host starts; for emulated hosts, those of all of them as they are planned."""
    if spec.placement.emulated:
        return emulated.starts(spec, folder, emulate.planned(spec.placement))
    return LAUNCHERS[spec.placement.launcher](spec, folder, host_index)


def execute(run: Run, spec: Spec, host_index: int = 0, progress: Progress | None = None) -> Run:
    """Run what was prepared. Returns the finished run, or raises the one-line error that says which rank failed and why."""
    try:
        with emulate.network(spec.placement) if spec.placement.emulated else nullcontext() as network:
            if spec.placement.launcher == "slurm":
                slurm.follow(run, spec, progress)
                return run
            if network is not None:
                write_atomic(run.folder / "network.json", network.document())
                starts = emulated.starts(spec, run.folder, network)
            else:
                starts = starts_of(spec, run.folder, host_index)
            supervise(run, spec, starts, host_index, progress)
    except KeyboardInterrupt:
        _did_not_start(run, host_index, "cancelled", "stopped by the user")
        raise RunCancelled(f"stopped before the run in {run.folder} began") from None
    except OSError as error:
        problem = folder_error(run.folder, error)
        _did_not_start(run, host_index, "failed", str(problem))
        raise problem from None
    except LockstepError as error:
        _did_not_start(run, host_index, "failed", str(error))
        raise
    finally:
        if run.made_here:
            run.release_reserve()
            shutil.rmtree(run.folder / DATA, ignore_errors=True)
    return run


def _did_not_start(run: Run, host_index: int, state: str, cause: str) -> None:
    """Who supervises a run says how it ended; before that, it is said here."""
    if host_index == 0 and run.recorded_status()["state"] == "planned" and (run.folder / "run.json").exists():
        run.write_final_status(state, cause=cause)


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
    unknown = [name for name in options if name not in Options.__struct_fields__]
    if unknown:
        raise InputError(
            f"lockstep.train has no option '{unknown[0]}': it has {', '.join(Options.__struct_fields__)}; "
            "what is computed belongs into Recipe, where into Placement"
        )
    chosen = Options(data_root=str(data_root) if data_root else None, **options)
    run, spec = prepare(recipe or Recipe(), placement or Placement(), chosen, Path(runs) if runs else None, name)
    return execute(run, spec)
