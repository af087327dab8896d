"""`lockstep follow`: go back to a run that is under way, and see it to its end."""

from __future__ import annotations

from pathlib import Path

import click

from lockstep.cli.options import json_option, runs_option
from lockstep.run import Run, runs_root

EPILOG = """\b
Examples:
  lockstep run launcher=slurm hosts=2 ranks=4 --detach
  lockstep follow last                    its progress, and its results when it is done
  lockstep follow last --quiet --json     wait for it in a script

Ctrl-C ends the following, not the run.
"""


@click.command("follow", epilog=EPILOG)
@click.argument("run", default="last")
@runs_option
@click.option("--quiet", is_flag=True, help="No progress.")
@json_option
def command(run: str, runs: Path | None, quiet: bool, as_json: bool) -> None:
    """Follow a run that is under way (a Slurm job that was left, or one of another terminal) to its end."""
    from lockstep.cli.output import print_json
    from lockstep.cli.show import document, next_of, print_run
    from lockstep.launch import detached
    from lockstep.report.progress import ProgressLine

    found = Run.find(run, runs_root(runs))
    with ProgressLine(quiet=quiet) as progress:
        detached.follow(found, progress)
    if as_json:
        print_json(document(found))
    else:
        print_run(found, ranks=False)
        if not quiet:
            next_of(found, runs)
