"""`lockstep attach`: where the time of a training goes that was not written for Lockstep."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from lockstep.cli.options import runs_option, whole
from lockstep.cli.output import next_step, note, place
from lockstep.errors import InputError, LockstepError

if TYPE_CHECKING:
    from lockstep.measure.view import RunView
    from lockstep.run import Run

EPILOG = """\b
Examples:
  lockstep attach -- python train.py --epochs 3
  lockstep attach -- torchrun --nproc-per-node 2 train.py
  lockstep attach --batch 256 -- \\
    accelerate launch --multi_gpu --num_processes 2 train.py
  lockstep attach --name before -- mpirun -n 2 python train.py

Nothing of the script is edited, and it computes the same bits. Its output and its exit code are its own; what is ours
goes to stderr. docs/attach.md says how each part is told.
"""


# What follows the program's name is the program's, also without '--'.
@click.command("attach", epilog=EPILOG, context_settings={"allow_interspersed_args": False})
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND...")
@click.option("--name", help="Name of the run folder (default: made from time and script).")
@click.option("--batch", type=whole(1), help="The global batch, over all ranks: with it, samples per second are known.")
@runs_option
def command(command: tuple[str, ...], name: str | None, batch: int | None, runs: Path | None) -> None:
    """Run any training command, unedited, and record where the time of its steps goes."""
    from lockstep.attach.command import attach
    from lockstep.measure.view import RunView

    if not command:
        raise InputError("attach: no command: write it after '--', for example: lockstep attach -- python train.py")
    made: list[Run] = []
    try:
        attach(command, runs, name, batch, made.append)
    except LockstepError:
        if made:
            _tell(RunView(made[0].folder), runs, ended_well=False)
        raise
    _tell(RunView(made[0].folder), runs, ended_well=True)


def _tell(run: RunView, runs: Path | None, ended_well: bool) -> None:
    """The answer, then the split, then what to type next."""
    summary, phases = run.summary() or {}, run.phases()
    if not phases:
        if ended_well:
            note(
                "lockstep: no step was seen: the command never called an optimizer of torch.optim in a Python that "
                "reads PYTHONPATH (docs/attach.md#limits)"
            )
        return
    from lockstep.report.run import attached_lines

    for line in attached_lines(run, summary, phases):
        note(line)
    said = "explain" if ended_well else "show"
    next_step(f"lockstep {said} {run.id}{place(runs)}")
