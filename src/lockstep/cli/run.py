"""`lockstep run`: train a recipe on a placement."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from lockstep.cli.numbers import real, whole
from lockstep.cli.output import json_option, note, print_json

EPILOG = """\b
Examples:
  lockstep run                                      the published MNIST recipe, one process
  lockstep run ranks=2 global_batch=256 epochs=1    two ranks, started by us
  lockstep run launcher=torchrun ranks=2            two ranks, started by torchrun
  lockstep run my.toml optimizer.lr=0.001           a recipe file, one key changed
  lockstep run model=nets.py:Net data=sets.py:load  your own model and data set
  lockstep run published/d-mnist ranks=2            a published recipe ('lockstep recipes' lists them)
  lockstep run train.py ranks=2 -- --width 64       your own training loop (docs/own-loop.md)
  lockstep run --checkpoint-every 1 epochs=20       … and after a crash: lockstep run --resume last
  lockstep run ranks=2 --trace 20 --profile 5       where the time of 20 steps went (docs/timeline.md)
  lockstep run ranks=4 hosts=2 rendezvous=10.0.0.1:29500 --dry-run

\b
Recipe keys (what is computed): model, model_args.*, data, normalize, augment.*, train_limit, test_limit,
  shuffle, global_batch, batch_per_rank, epochs, max_steps, optimizer.*, schedule.*, lr_rule, lr_batch,
  precision, regularize.*, early_stopping.*, compile, seed
Placement keys (where): launcher, hosts, link, ranks, threads, pin, device, backend, strategy, ddp.*,
  local_sgd.*, zero, micro_batch, accumulation, eval_batch, memory_format, rendezvous, timeout_s,
  max_restarts, mpi, slurm.*
docs/recipes.md and docs/placements.md say what each means.
"""

runs_option = click.option(
    "--runs", type=click.Path(path_type=Path), help="Where runs are kept (LOCKSTEP_RUNS, else ./runs)."
)
data_root_option = click.option(
    "--data-root", type=click.Path(path_type=Path), help="Look for the data set here first."
)


def complete_key(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
    """Shell completion of keys, and of recipe files."""
    from click.shell_completion import CompletionItem

    from lockstep.settings import all_keys

    keys = [CompletionItem(f"{key}=", type="nospace") for key in all_keys() if key.startswith(incomplete)]
    return keys or [CompletionItem(incomplete, type="file")]


words_argument = click.argument("words", nargs=-1, metavar="[RECIPE.toml] [KEY=VALUE]...", shell_complete=complete_key)


def read_words(words: tuple[str, ...], base: dict[str, Any] | None = None) -> tuple[Any, Any]:
    """Recipe files, names of published recipes and key=value words, in any order, as a recipe and a placement."""
    from lockstep.recipes import path_of
    from lockstep.settings import load

    files, rest = [], []
    for word in words:
        file = None if "=" in word else Path(word) if word.endswith(".toml") else path_of(word)
        if file:
            files.append(file)
        else:
            rest.append(word)
    return load(files, rest, base)


def split_script(words: tuple[str, ...]) -> tuple[tuple[str, ...], str | None, list[str]]:
    """The words for us, the user's own loop if one is named, and the words for it (those after `--`)."""
    at = next((i for i, word in enumerate(words) if word.endswith(".py") and "=" not in word), None)
    if at is None:
        return words, None, []
    ours = [word for word in words[at + 1 :] if "=" in word and not word.startswith("-")]
    theirs = [word for word in words[at + 1 :] if word not in ours]
    return (*words[:at], *ours), str(Path(words[at]).absolute()), theirs


@click.command("run", epilog=EPILOG)
@words_argument
@click.option("--name", help="Name of the run folder (default: made from time, model and placement).")
@runs_option
@data_root_option
@click.option(
    "--time-limit",
    "time_limit_s",
    type=real(0, open_=True),
    help="Stop all ranks after so many seconds.",
)
@click.option("--checkpoint-every", type=whole(1), help="Keep a checkpoint every so many epochs.")
@click.option("--checkpoint-steps", type=whole(1), help="Keep one every so many steps, too.")
@click.option("--keep", "keep_checkpoints", type=whole(1), default=2, show_default=True, help="How many.")
@click.option("--resume", metavar="RUN", help="Go on from the last checkpoint of a run, in a folder of its own.")
@click.option("--trace", type=click.IntRange(1, 1000), help="Keep the timeline of so many steps after warm-up.")
@click.option(
    "--profile", type=click.IntRange(1, 100), help="Let torch's profiler look at so many steps: a table of operators."
)
@click.option("--host-index", type=whole(0, 100_000), help="With hosts=N: which of them this one is, 0 to N-1.")
@click.option("--dry-run", is_flag=True, help="Show what would run, and start nothing.")
@click.option("--quiet", is_flag=True, help="No progress.")
@json_option
def command(
    words: tuple[str, ...],
    name: str | None,
    runs: Path | None,
    data_root: Path | None,
    time_limit_s: float | None,
    checkpoint_every: int | None,
    checkpoint_steps: int | None,
    keep_checkpoints: int,
    resume: str | None,
    trace: int | None,
    profile: int | None,
    host_index: int | None,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Train a recipe on a placement; a run folder comes out."""
    from lockstep.cli.progress import ProgressLine
    from lockstep.errors import InputError
    from lockstep.launch import execute, prepare, specify
    from lockstep.launch.resume import resumed
    from lockstep.machine import facts
    from lockstep.run import Options, Run, runs_root

    ours, script, script_args = split_script(words)
    earlier = Run.find(resume, runs_root(runs)) if resume else None
    recipe, placement = resumed(earlier, ours) if earlier else read_words(ours)
    options = Options(
        data_root=str(data_root.absolute()) if data_root else None,
        time_limit_s=time_limit_s,
        checkpoint_every=checkpoint_every,
        checkpoint_steps=checkpoint_steps,
        keep_checkpoints=keep_checkpoints,
        resume_from=str(earlier.folder.absolute()) if earlier else None,
        script=script,
        script_args=script_args,
        trace=trace,
        profile=profile,
    )

    def check(spec: Any) -> None:
        for warning in warnings(spec):
            note(f"warning: {warning}")
        if problem := _cannot_look(spec):
            raise InputError(problem)

    if dry_run:
        folder, spec = specify(recipe, placement, options, runs, name)
        check(spec)
        _show_plan(words, folder, spec, as_json)
        return
    run, spec = prepare(recipe, placement, options, runs, name, host_index, check)
    progress = None if quiet else ProgressLine()
    if not quiet:
        if not script:
            note(spec.plan.line())
        for line in remarks(spec):
            note(line)
    if spec.placement.device == "cpu" and spec.placement.launcher != "slurm":
        facts.start_in_background()
    try:
        execute(run, spec, host_index or 0, progress)
    finally:
        if progress:
            progress.clear()
    if host_index:
        return  # the first host has the results
    from lockstep.cli.show import document, model_lines, print_run

    if as_json:
        for line in model_lines(run):
            note(line)
        print_json(document(run))
    else:
        print_run(run, ranks=False)


def _cannot_look(spec: Any) -> str | None:
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
    from lockstep.placement import cores, ranks_per_host
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


def remarks(spec: Any) -> list[str]:
    """What a run says about itself before it starts."""
    from lockstep.machine import facts
    from lockstep.machine.formats import cap_line, precision_line
    from lockstep.placement import changes_mathematics, unknown_mathematics
    from lockstep.run import Run

    recipe = spec.recipe
    found = [f"backend {spec.why_backend}"] if spec.why_backend else []
    if recipe.batch_per_rank:
        found.append(
            f"batch stated per rank: the global batch is {recipe.global_batch} on this placement, another recipe on others"
        )
    if spec.plan.lr_note:
        found.append(spec.plan.lr_note)
    if recipe.precision != "fp32":
        found.append(precision_line(recipe.precision, spec.placement))
    cap = cap_line(facts.known()) if spec.placement.device == "cpu" and spec.placement.launcher != "slurm" else None
    if cap:
        found.append(cap)
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


def _show_plan(words: tuple[str, ...], folder: Path, spec: Any, as_json: bool) -> None:
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
        import msgspec

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
    for line in remarks(spec):
        click.echo(f"# {line}")
    click.echo(f"# run folder: {folder}")
    for host, line in enumerate(commands):
        click.echo(f"# on host {host}:\n{line}")
    click.echo("# launch command" + (" (each of the above starts this on its host):" if commands else ":"))
    for starts in raw if commands else raw[:1]:
        for argv in starts:
            click.echo(shlex.join(argv))
