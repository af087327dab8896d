"""Before a process starts: check everything that can be checked, and make the run's folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from lockstep.errors import InputError
from lockstep.launch import join, torchrun
from lockstep.launch.emulated import network as emulate
from lockstep.launch.kernels import kernels_made
from lockstep.launch.specification import complete, draft_of
from lockstep.placement import Placement, one_command_per_host
from lockstep.recipe import Recipe
from lockstep.run import DATA, KERNELS, FolderExists, Options, Part, Run, Spec, writing


def prepare(
    recipe: Recipe,
    placement: Placement,
    options: Options | None = None,
    runs: Path | None = None,
    name: str | None = None,
    host_index: int | None = None,
    check: Callable[[Spec], None] | None = None,
    part: Part | None = None,
    taken: int = 0,
) -> tuple[Run, Spec]:
    """Check everything that can be checked before a process starts, and make the run's folder, as planned.

    The folder comes first: a user's own data set is laid out in it, and nobody else can have taken its name. Wrong input, found
    here or by `check`, leaves no folder behind. `taken`: cores that other work has, of a run that is compared with none (launch/waiting.py).
    """
    draft = draft_of(recipe, placement, options, runs, name, taken)
    join.check_host(draft.placement, host_index, name)
    torchrun.check_meeting_point(draft.placement, first_host=not host_index)
    if draft.placement.emulated and (problem := emulate.problem()):
        raise InputError(problem)
    try:
        run = Run.claim(draft.folder)
    except FolderExists:
        if one_command_per_host(draft.placement):
            return join.join(draft, host_index or 0, check)
        raise
    try:
        with kernels_made(draft):
            spec = msgspec.structs.replace(complete(draft, run.folder / DATA), part=part)
        if check:
            check(spec)
        _take_kernels(run, draft.options)
        run.plan(spec)
        if one_command_per_host(spec.placement):
            join.register_host(run, host_index or 0)
    except BaseException:
        run.remove()
        raise
    return run, spec


def _take_kernels(run: Run, options: Options) -> None:
    """The choices of the run that this one repeats or goes on from: timed anew, they might be others, and so would the bits."""
    source = options.kernels_of or options.resume_from
    if source and (chosen := Path(source) / KERNELS).is_file():
        with writing(run.folder):
            shutil.copyfile(chosen, run.folder / KERNELS)
