"""`lockstep study copy`: a built-in study as a file of one's own."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from lockstep.cli.output import next_step
from lockstep.cli.schema import write_own


@click.command("copy", epilog="\b\nExamples:\n  lockstep study copy batch-size -o mine.toml")
@click.argument("name")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    help="The file to write. Its JSON Schema goes beside it, so that editors complete its keys.",
)
def copy(name: str, output: Path) -> None:
    """Make a built-in study a file of your own, to change it."""
    from lockstep.study import builtin

    write_own(output, "study", builtin.text(name))
    next_step(f"lockstep study run {shlex.quote(str(output))} --dry-run (its plan, and how long it takes)")
