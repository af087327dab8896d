"""`lockstep run --dry-run`: the whole plan."""

from __future__ import annotations

import shlex
import shutil
import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from click.core import ParameterSource

from lockstep.cli.output import next_step, print_json
from lockstep.cli.schema import NAMED

# What makes a command that is printed another one than the command that prints it.
_NOT_REPEATED = ("host_index", "dry_run", "as_json")


def repeated_options(context: click.Context, folder: Path, spec: Any) -> list[str]:
    """Every option that this command was given, as another host has to be given it: none is named here, so none is forgotten."""
    settled = {"name": folder.name, "runs": folder.parent, "data_root": spec.options.data_root}
    # 'last' would be another run as soon as the first host has started.
    settled["resume"] = spec.options.resume_from
    return _options(context, _NOT_REPEATED, settled)


def without_dry_run(context: click.Context, words: Sequence[str]) -> str:
    """The command that is being carried out, without --dry-run."""
    options = _options(context, ("dry_run",), {})
    # Of the user's script: only `--` keeps them from being ours.
    own = any(word.startswith("-") for word in words)
    typed = [*options, "--", *words] if own else [*words, *options]
    name = context.command_path.removeprefix(context.find_root().command_path)  # which is however we were called
    return f"lockstep{name} {shlex.join(typed)}".rstrip()


def _options(context: click.Context, but: Collection[str], settled: Mapping[str, Any]) -> list[str]:
    """The options that were given, and those that are settled by now, as they are typed."""
    words: list[str] = []
    for option in context.command.params:
        name = option.name or ""
        if not isinstance(option, click.Option) or name in but:
            continue
        value = settled.get(name, context.params[name])
        given = context.get_parameter_source(name) not in (None, ParameterSource.DEFAULT)
        if value is None or not (given or name in settled):
            continue
        words += [option.opts[-1]] if option.is_flag else [option.opts[-1], str(value)]
    return words


def _comment(text: str) -> None:
    """A line of a TOML file, or as many as a terminal's window makes of it: all of them comments."""
    width = shutil.get_terminal_size().columns - 2 if sys.stdout.isatty() else len(text) + 1
    for line in textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False):
        click.echo(f"# {line}")


def show_plan(words: tuple[str, ...], folder: Path, spec: Any, as_json: bool) -> None:
    from lockstep.launch import starts_of
    from lockstep.launch.describe import exchanged_bytes, host_commands
    from lockstep.launch.slurm import script
    from lockstep.placement import one_command_per_host
    from lockstep.settings import as_toml

    payload = exchanged_bytes(spec)
    per_host = one_command_per_host(spec.placement)
    hosts = range(spec.placement.hosts if per_host else 1)
    raw = [[start.words() for start in starts_of(spec, folder, host)] for host in hosts]
    options = repeated_options(click.get_current_context(), folder, spec)
    commands = host_commands(words, options, spec.placement.hosts) if per_host else []
    batch = script.text(spec, folder) if spec.placement.launcher == "slurm" else None
    if as_json:
        print_json(
            {
                "spec": msgspec.to_builtins(spec),
                "folder": str(folder),
                "exchange": payload,
                "host_commands": commands,
                "launch": raw,
                **({"script": batch} if batch else {}),
            }
        )
        return
    click.echo(NAMED["recipe"])
    _comment("resolved recipe and placement; save it as a .toml file to run it again")
    click.echo(as_toml(spec.recipe, spec.placement))
    _comment(spec.plan.line())
    _comment(payload["line"])
    from lockstep.launch.remarks import decisions, remarks

    for line in [*decisions(spec, everything=True), *remarks(spec)]:
        _comment(line)
    click.echo(f"# run folder: {folder}")
    for host, line in enumerate(commands):
        click.echo(f"# on host {host}:\n{line}")
    click.echo("# launch command" + (" (each of the above starts this on its host):" if commands else ":"))
    for starts in raw if commands else raw[:1]:
        for argv in starts:
            click.echo(shlex.join(argv))
    if batch:
        click.echo(f"# {script.NAME}:")
        click.echo(batch, nl=False)
    next_step(without_dry_run(click.get_current_context(), words))
