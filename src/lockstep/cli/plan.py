"""What a run says before it starts: warnings, what Lockstep decided, and with --dry-run the whole plan."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click
import msgspec
from click.core import ParameterSource

from lockstep.cli.output import print_json
from lockstep.run import Run


def cannot_look(spec: Any) -> str | None:
    """Why --trace or --profile would leave nothing, where that is known before the start."""
    from lockstep.measure.records import WARMUP_STEPS

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


def warnings(spec: Any) -> list[str]:
    """What a user should know before the run starts: settings without effect, too few cores."""
    from lockstep import placement as places
    from lockstep.machine.cores import cores
    from lockstep.placement import ranks_per_host
    from lockstep.recipe import unused_settings

    found: list[str] = unused_settings(spec.recipe) + places.unused_settings(spec.placement)
    placement = spec.placement
    local = placement.ranks if placement.emulated else ranks_per_host(placement)
    if placement.device == "cpu" and placement.launcher != "slurm" and local * placement.threads > cores():
        found.append(
            f"ranks={local} x threads={placement.threads} on one host need {local * placement.threads} cores, but there are {cores()}: "
            "they will take turns, and are not pinned"
        )
    if spec.plan.global_batch > spec.plan.train_samples:
        found.append(
            f"global_batch={spec.plan.global_batch} is more than the {spec.plan.train_samples} training samples: one step an epoch"
        )
    return found


# What users expect of a placement need not be said each time; --dry-run and `show` say all of it.
_AS_EXPECTED = ("launcher", "device", "strategy", "threads", "memory_format", "ddp.find_unused_parameters")


def decisions(spec: Any, everything: bool = False) -> list[str]:
    """What Lockstep decided and why, a line each."""
    passed_over = () if everything else (*_AS_EXPECTED, *(["backend"] if spec.placement.ranks == 1 else []))
    if spec.placement.strategy == "flat":  # many expect ddp
        passed_over = tuple(key for key in passed_over if key != "strategy")
    return [
        f"{key} {value}: {reason}" if value else reason
        for key, value, reason in spec.decisions()
        if key not in passed_over
    ]


def remarks(spec: Any) -> list[str]:
    """What else a run says about itself before it starts."""
    from lockstep.placement import changes_mathematics, unknown_mathematics

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


# What makes a command that is printed another one than the command that prints it.
_NOT_REPEATED = ("host_index", "dry_run", "as_json")


def repeated_options(context: click.Context, folder: Path, spec: Any) -> list[str]:
    """Every option that this command was given, as another host has to be given it: none is named here, so none is forgotten."""
    settled = {"name": folder.name, "runs": folder.parent, "data_root": spec.options.data_root}
    # 'last' would be another run as soon as the first host has started.
    settled["resume"] = spec.options.resume_from
    words: list[str] = []
    for option in context.command.params:
        name = option.name or ""
        if not isinstance(option, click.Option) or name in _NOT_REPEATED:
            continue
        value = settled.get(name, context.params[name])
        given = context.get_parameter_source(name) not in (None, ParameterSource.DEFAULT)
        if value is None or not (given or name in settled):
            continue
        words += [option.opts[-1]] if option.is_flag else [option.opts[-1], str(value)]
    return words


def show_plan(words: tuple[str, ...], folder: Path, spec: Any, as_json: bool) -> None:
    from lockstep.launch import starts_of
    from lockstep.launch.describe import exchanged_bytes, host_commands
    from lockstep.placement import one_command_per_host
    from lockstep.settings import as_toml

    payload = exchanged_bytes(spec)
    per_host = one_command_per_host(spec.placement)
    hosts = range(spec.placement.hosts if per_host else 1)
    raw = [[start.words() for start in starts_of(spec, folder, host)] for host in hosts]
    options = repeated_options(click.get_current_context(), folder, spec)
    commands = host_commands(words, options, spec.placement.hosts) if per_host else []
    if as_json:
        print_json(
            {
                "spec": msgspec.to_builtins(spec),
                "folder": str(folder),
                "exchange": payload,
                "host_commands": commands,
                "launch": raw,
            }
        )
        return
    click.echo("# resolved recipe and placement; save it as a .toml file to run it again")
    click.echo(as_toml(spec.recipe, spec.placement))
    click.echo(f"# {spec.plan.line()}")
    click.echo(f"# {payload['line']}")
    for line in [*decisions(spec, everything=True), *remarks(spec)]:
        click.echo(f"# {line}")
    click.echo(f"# run folder: {folder}")
    for host, line in enumerate(commands):
        click.echo(f"# on host {host}:\n{line}")
    click.echo("# launch command" + (" (each of the above starts this on its host):" if commands else ":"))
    for starts in raw if commands else raw[:1]:
        for argv in starts:
            click.echo(shlex.join(argv))
