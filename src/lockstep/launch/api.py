"""A run from its settings to its results: what `lockstep run` and `lockstep.run` both do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import InputError
from lockstep.launch import detached
from lockstep.launch.execution import execute
from lockstep.launch.preparation import prepare
from lockstep.launch.remarks import cannot_look, decisions, remarks, warnings
from lockstep.launch.resume import resumed
from lockstep.launch.slurm import launcher as slurm
from lockstep.launch.supervise import Progress
from lockstep.machine import facts
from lockstep.machine.crowded import taken
from lockstep.placement import Placement, elsewhere
from lockstep.recipe import Recipe
from lockstep.run import Options, Run, Spec
from lockstep.words import read_words, split_script


def requested(
    words: tuple[str, ...], base: Mapping[str, Any], earlier: Run | None, **options: Any
) -> tuple[Recipe, Placement, Options]:
    """What the words ask for, with the settings `base` that they may change, or with the run that is gone on from. `options`: those of `Options`."""
    ours, script, script_args = split_script(words)
    if earlier and base:
        raise InputError(
            "resume: the earlier run says what is computed: state what changes as words or keywords, not as Recipe or Placement"
        )
    recipe, placement = resumed(earlier, ours) if earlier else read_words(ours, base)
    resume_from = str(earlier.folder.absolute()) if earlier else None
    if earlier and not (options.get("checkpoint_every") or options.get("checkpoint_steps")):
        # What was kept so far is kept on: it may be interrupted again.
        was = earlier.spec().options
        options |= {"checkpoint_every": was.checkpoint_every, "checkpoint_steps": was.checkpoint_steps}
    return recipe, placement, Options(resume_from=resume_from, script=script, script_args=script_args, **options)


def train(
    recipe: Recipe,
    placement: Placement,
    options: Options,
    *,
    runs: Path | None = None,
    name: str | None = None,
    host_index: int | None = None,
    detach: bool = False,
    tell: Callable[[str], None],
    quiet: bool = False,
    progress: Progress | None = None,
) -> Run:
    """Train a recipe on a placement, in processes of its own, and return the finished run. `quiet`: tell warnings alone.

    `detach`: submit it as a Slurm job, and return the run while it goes on.
    """

    def looked_at(spec: Spec) -> None:
        check(spec, tell)
        if detach:
            detached.check(spec)

    crowd = 0 if placement.threads else taken()
    run, spec = prepare(recipe, placement, options, runs, name, host_index, looked_at, taken=crowd)
    if not quiet:
        for line in [*([] if options.script else [spec.plan.line()]), *decisions(spec), *remarks(spec)]:
            tell(line)
    if detach:
        try:
            job = slurm.leave(run, spec)
        except InputError:  # sbatch has refused it: it was never a run
            run.remove()
            raise
        tell(slurm.goes_on(run, job))
        return run
    if spec.placement.device == "cpu" and not elsewhere(spec.placement):
        facts.start_in_background()
    return execute(run, spec, host_index or 0, progress)


def check(spec: Spec, tell: Callable[[str], None]) -> None:
    """What a user should know before anything starts; and what would come to nothing."""
    for warning in warnings(spec):
        tell(f"warning: {warning}")
    if problem := cannot_look(spec):
        raise InputError(problem)
