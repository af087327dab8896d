"""What a run would be: all that is known of it before its folder is made, and then what follows from its data."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from lockstep import models, task
from lockstep.data import check_name as check_data_name
from lockstep.data import fit, open_data
from lockstep.errors import InputError
from lockstep.launch import waiting
from lockstep.launch.launchers import starts_of
from lockstep.measure.environment import version_of
from lockstep.placement import Placement
from lockstep.plan import plan
from lockstep.recipe import Recipe
from lockstep.resolve import resolve
from lockstep.run import Options, Spec, check_name, new_id, runs_root
from lockstep.settings import checked
from lockstep.training.script import script_recipe


class Draft(NamedTuple):
    """A run as far as it is known without its data."""

    folder: Path
    recipe: Recipe
    placement: Placement
    options: Options
    why: dict[str, str]


def specify(
    recipe: Recipe,
    placement: Placement,
    options: Options | None = None,
    runs: Path | None = None,
    name: str | None = None,
    taken: int = 0,
) -> tuple[Path, Spec]:
    """What a run would be: the folder it would have, and its spec. Nothing is left on disk. `taken`: cores that other work has."""
    draft = draft_of(recipe, placement, options, runs, name, taken)
    with tempfile.TemporaryDirectory(prefix="lockstep-data-") as scratch:
        return draft.folder, complete(draft, Path(scratch))


def draft_of(
    recipe: Recipe,
    placement: Placement,
    options: Options | None,
    runs: Path | None,
    name: str | None,
    taken: int = 0,
) -> Draft:
    recipe, placement, options = checked(recipe), checked(placement), checked(options or Options())
    if placement.slurm.requeue and options.script:
        raise InputError(
            "slurm.requeue=true: a loop of your own keeps no checkpoint that Lockstep could go on from: leave it out"
        )
    if (placement.max_restarts or placement.slurm.requeue) and options.checkpoint_every is None:
        options = msgspec.structs.replace(options, checkpoint_every=1)
    if options.script:
        recipe = script_recipe(recipe, placement, options)
    else:
        models.check_name(recipe.model)
        check_data_name(recipe.data)
        task.check(recipe)
    asked = placement
    recipe, placement, why = resolve(recipe, placement, script=bool(options.script))
    if told := waiting.reason(asked, placement, taken):
        why, options = {**why, "waiting": told}, msgspec.structs.replace(options, sleep_to_wait=True)
    if name is not None:
        check_name("--name ", name, "run")
    folder = (runs_root(runs) / (name or new_id(recipe, placement))).absolute()
    return Draft(folder, recipe, placement, options, why)


def complete(draft: Draft, scratch: Path) -> Spec:
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
        why=draft.why,
    )
    command = [start.words() for start in starts_of(spec, draft.folder, host_index=0)]
    return msgspec.structs.replace(spec, command=command)


def _count(recipe: Recipe, options: Options, scratch: Path) -> tuple[int, int, str]:
    """Fetch the data if need be (once, before any rank starts) and count it."""
    if options.script:
        return recipe.global_batch, 1, f"the script {options.script}"  # its data are its own business
    data = open_data(recipe.data, options.data_root, scratch=scratch)
    fit.check(recipe, data)
    return len(data.train_labels), len(data.test_labels), data.origin
