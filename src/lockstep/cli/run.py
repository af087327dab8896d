"""`lockstep run`: train a recipe on a placement."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click

from lockstep.cli.output import json_option, note, print_json

EPILOG = """\b
Examples:
  lockstep run                                      the published MNIST recipe, one process
  lockstep run ranks=2 global_batch=256 epochs=1    two ranks, started by us
  lockstep run launcher=torchrun ranks=2            two ranks, started by torchrun
  lockstep run my.toml optimizer.lr=0.001           a recipe file, one key changed
  lockstep run model=nets.py:Net data=sets.py:load  your own model and data set
  lockstep run ranks=4 hosts=2 rendezvous=10.0.0.1:29500 --dry-run

\b
Recipe keys (what is computed): model, model_args.*, data, normalize, train_limit, test_limit, shuffle,
  global_batch, batch_per_rank, epochs, max_steps, optimizer.*, seed
Placement keys (where): launcher, hosts, ranks, threads, pin, device, backend, strategy, micro_batch,
  accumulation, eval_batch, memory_format, rendezvous, timeout_s
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
    """Recipe files and key=value words, in any order, as a recipe and a placement."""
    from lockstep.settings import load

    files = [Path(word) for word in words if "=" not in word and word.endswith(".toml")]
    return load(files, [word for word in words if "=" in word or not word.endswith(".toml")], base)


@click.command("run", epilog=EPILOG)
@words_argument
@click.option("--name", help="Name of the run folder (default: made from time, model and placement).")
@runs_option
@data_root_option
@click.option(
    "--time-limit",
    "time_limit_s",
    type=click.FloatRange(min=0, min_open=True),
    help="Stop all ranks after so many seconds.",
)
@click.option("--host-index", type=click.IntRange(min=0), help="With hosts=N: which of them this one is, 0 to N-1.")
@click.option("--dry-run", is_flag=True, help="Show what would run, and start nothing.")
@click.option("--quiet", is_flag=True, help="No progress.")
@json_option
def command(
    words: tuple[str, ...],
    name: str | None,
    runs: Path | None,
    data_root: Path | None,
    time_limit_s: float | None,
    host_index: int | None,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Train a recipe on a placement; a run folder comes out."""
    from lockstep.cli.progress import ProgressLine
    from lockstep.errors import InputError
    from lockstep.launch import discard, execute, prepare
    from lockstep.placement import one_command_per_host
    from lockstep.run import Options

    recipe, placement = read_words(words)
    options = Options(data_root=str(data_root.absolute()) if data_root else None, time_limit_s=time_limit_s)
    folder, spec = prepare(recipe, placement, options, runs, name)
    for warning in warnings(spec):
        note(f"warning: {warning}")
    if dry_run:
        discard(folder)
        _show_plan(words, folder, spec, as_json)
        return
    if one_command_per_host(spec.placement) and (host_index is None or name is None):
        discard(folder)
        raise InputError(
            f"hosts={spec.placement.hosts}: every host starts its own command with the same --name and its own --host-index; "
            "--dry-run prints them"
        )
    progress = None if quiet else ProgressLine()
    if not quiet:
        note(spec.plan.line())
        if spec.why_backend:
            note(f"backend {spec.why_backend}")
        if spec.recipe.batch_per_rank:
            note(
                f"batch stated per rank: the global batch is {spec.recipe.global_batch} on this placement, another recipe on others"
            )
    try:
        run = execute(folder, spec, host_index or 0, progress)
    finally:
        if progress:
            progress.clear()
    if host_index:
        return  # the first host has the results
    from lockstep.cli.show import document, print_run

    if as_json:
        print_json(document(run))
    else:
        print_run(run, ranks=False)


def warnings(spec: Any) -> list[str]:
    """What a user should know before the run starts: settings without effect, too few cores."""
    from lockstep.placement import cores, ranks_per_host
    from lockstep.recipe import unused_settings

    found: list[str] = unused_settings(spec.recipe)
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


def _show_plan(words: tuple[str, ...], folder: Path, spec: Any, as_json: bool) -> None:
    from lockstep.launch import starts_of
    from lockstep.launch.describe import exchanged_bytes, host_commands
    from lockstep.placement import one_command_per_host
    from lockstep.settings import as_toml

    payload = exchanged_bytes(spec)
    per_host = one_command_per_host(spec.placement)
    hosts = range(spec.placement.hosts if per_host else 1)
    raw = [[start.words() for start in starts_of(spec, folder, host)] for host in hosts]
    commands = host_commands(words, folder, spec) if per_host else []
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
    if spec.why_backend:
        click.echo(f"# backend {spec.why_backend}")
    click.echo(f"# run folder: {folder}")
    for host, line in enumerate(commands):
        click.echo(f"# on host {host}:\n{line}")
    click.echo("# launch command" + (" (each of the above starts this on its host):" if commands else ":"))
    for starts in raw if commands else raw[:1]:
        for argv in starts:
            click.echo(shlex.join(argv))
