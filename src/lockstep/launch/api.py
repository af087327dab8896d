"""A run from its settings to its results: what `lockstep run` and `lockstep.run` both do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lockstep.errors import InputError
from lockstep.launch.execution import execute
from lockstep.launch.preparation import prepare
from lockstep.launch.remarks import cannot_look, decisions, remarks, warnings
from lockstep.launch.supervise import Progress
from lockstep.machine import facts
from lockstep.machine.crowded import taken
from lockstep.placement import Placement
from lockstep.recipe import Recipe
from lockstep.run import Options, Run, Spec


def train(
    recipe: Recipe,
    placement: Placement,
    options: Options,
    *,
    runs: Path | None = None,
    name: str | None = None,
    host_index: int | None = None,
    tell: Callable[[str], None],
    quiet: bool = False,
    progress: Progress | None = None,
) -> Run:
    """Train a recipe on a placement, in processes of its own, and return the finished run. `quiet`: tell warnings alone."""
    crowd = 0 if placement.threads else taken()
    run, spec = prepare(recipe, placement, options, runs, name, host_index, lambda spec: check(spec, tell), taken=crowd)
    if not quiet:
        for line in [*([] if options.script else [spec.plan.line()]), *decisions(spec), *remarks(spec)]:
            tell(line)
    if spec.placement.device == "cpu" and spec.placement.launcher != "slurm":
        facts.start_in_background()
    return execute(run, spec, host_index or 0, progress)


def check(spec: Spec, tell: Callable[[str], None]) -> None:
    """What a user should know before anything starts; and what would come to nothing."""
    for warning in warnings(spec):
        tell(f"warning: {warning}")
    if problem := cannot_look(spec):
        raise InputError(problem)
