"""What a run says before it starts: settings without effect, too few cores, what Lockstep decided and why."""

from __future__ import annotations

from pathlib import Path

from lockstep import placement as places
from lockstep.inside.layout import WARMUP_STEPS
from lockstep.machine.cores import cores
from lockstep.placement import changes_mathematics, elsewhere, ranks_per_host, unknown_mathematics
from lockstep.recipe import unused_settings
from lockstep.run import Run, Spec


def cannot_look(spec: Spec) -> str | None:
    """Why --trace or --profile would leave nothing, where that is known before the start."""
    options = spec.options
    if not (options.trace or options.profile):
        return None
    name = "--trace" if options.trace else "--profile"
    if options.script:
        return f"{name} looks at the steps of a recipe, and {Path(options.script).name} is a loop of your own: leave it out"
    if options.trace and spec.placement.device == "cuda":
        return "--trace times a CPU's phases, and this run is on a GPU: use --profile there"
    name, before = ("--profile", WARMUP_STEPS + (options.trace or 0)) if options.profile else (name, WARMUP_STEPS)
    if spec.plan.total_steps <= before:
        return f"{name} looks at steps after the first {before}, and this run has {spec.plan.total_steps}: let it run longer"
    return None


def warnings(spec: Spec) -> list[str]:
    """What a user should know before the run starts: settings without effect, too few cores."""
    found: list[str] = unused_settings(spec.recipe) + places.unused_settings(spec.placement)
    if told := spec.why.get("waiting"):
        found.append(told)
    placement = spec.placement
    local = placement.ranks if placement.emulated else ranks_per_host(placement)
    threads = placement.threads or 1
    if placement.device == "cpu" and not elsewhere(placement) and local * threads > cores():
        found.append(
            f"ranks={local} x threads={threads} on one host need {local * threads} cores, but there are {cores()}: "
            "they will take turns, and are not pinned"
        )
    if spec.plan.global_batch > spec.plan.train_samples:
        found.append(
            f"global_batch={spec.plan.global_batch} is more than the {spec.plan.train_samples} training samples: one step an epoch"
        )
    return found


# What users expect of a placement need not be said each time, nor what is a warning already; --dry-run and `show` say all of it.
_AS_EXPECTED = ("launcher", "device", "strategy", "threads", "memory_format", "ddp.find_unused_parameters", "waiting")


def decisions(spec: Spec, everything: bool = False) -> list[str]:
    """What Lockstep decided and why, a line each."""
    passed_over = () if everything else (*_AS_EXPECTED, *(["backend"] if spec.placement.ranks == 1 else []))
    if spec.placement.strategy == "flat":  # many expect ddp
        passed_over = tuple(key for key in passed_over if key != "strategy")
    return [
        f"{key} {value}: {reason}" if value else reason
        for key, value, reason in spec.decisions()
        if key not in passed_over
    ]


def remarks(spec: Spec) -> list[str]:
    """What else a run says about itself before it starts."""
    recipe = spec.recipe
    found = [spec.plan.lr_note] if spec.plan.lr_note else []
    changed = changes_mathematics(spec.placement, recipe)
    if changed:
        found.append(f"this placement changes the mathematics: {changed}")
    unknown = unknown_mathematics(spec.placement)
    if unknown:
        found.append(unknown)
    if spec.options.resume_from:
        found.append(f"going on from the last checkpoint of {spec.options.resume_from}")
        before = Run(Path(spec.options.resume_from)).spec().plan.total_steps
        if recipe.schedule.name in ("cosine", "onecycle") and before != spec.plan.total_steps:
            found.append(
                f"schedule.name={recipe.schedule.name} ended at step {before} before and ends at step {spec.plan.total_steps} now: "
                "what follows is not what a run of this length would have computed from the start"
            )
    return found
