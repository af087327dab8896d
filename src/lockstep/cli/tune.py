"""`lockstep tune`: the fastest way to train a recipe on this machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from lockstep.cli.options import SECONDS, data_root_option, json_option, read_words, runs_option, words_argument
from lockstep.cli.output import console, next_step, note, print_json

if TYPE_CHECKING:
    from lockstep.turns.knockout import Knockout

EPILOG = """\b
Examples:
  lockstep tune
  lockstep tune model=cifar-vgg data=cifar10 --budget 5min
  lockstep tune my.toml global_batch=512 --allow precision
  lockstep tune backend=gloo                     what you state stays as it is
  lockstep tune hosts=emulated:2 ranks=2 link=100mbit,5ms
  lockstep tune --cost core-seconds              for those who pay by the core

Varies ranks x threads, backend, strategy, bucket size, samples in a pass, memory format, fused kernels
and compile, one at a time around the best so far; what cannot win is out after a few windows.
The recipe stays the same: the same global batch and, but for --allow precision, the same numbers.
"""


@click.command("tune", epilog=EPILOG)
@words_argument
@click.option("--budget", type=SECONDS, default="60s", help="Stop after about this time.")
@click.option("--cost", type=click.Choice(["seconds", "core-seconds"]), default="seconds", help="What is to be least.")
@click.option("--allow", type=click.Choice(["precision"]), multiple=True, help="What may change the numbers.")
@runs_option
@data_root_option
@json_option
def command(
    words: tuple[str, ...],
    budget: float,
    cost: Literal["seconds", "core-seconds"],
    allow: tuple[str, ...],
    runs: Path | None,
    data_root: str | None,
    as_json: bool,
) -> None:
    """Find the fastest way to train a recipe on this machine."""
    import msgspec

    from lockstep.errors import InputError, RunCancelled
    from lockstep.report.terminal import draw_answers, draw_table
    from lockstep.report.tune import command_line, tune_part
    from lockstep.settings import changed
    from lockstep.tune import Search
    from lockstep.tune.stages import LEAST_STAGE_S

    if budget < LEAST_STAGE_S:
        raise InputError(
            f"tune: --budget {budget:g}s is too short to start and race anything: give it {LEAST_STAGE_S:g}s or more"
        )
    if script := next((word for word in words if word.endswith(".py") and "=" not in word), None):
        raise InputError(
            f"tune: {script} has a loop of its own: race its ways yourself, lockstep race '{script} ranks=1' '{script} ranks=2'"
        )
    recipe, placement = read_words(words)
    if placement.launcher == "slurm":
        raise InputError(
            "tune: ways share their cores, and jobs do not: tune within an allocation, without launcher=slurm"
        )
    # In words, or in a recipe file.
    stated = {*(word.partition("=")[0].replace("-", "_") for word in words if "=" in word), *changed(recipe, placement)}
    live = Live(budget)
    try:
        found = Search(recipe, placement, stated, budget, cost, allow, runs, data_root, note, live).run()
    except KeyboardInterrupt:
        raise RunCancelled("stopped; what was measured is in the folder of races") from None
    line = command_line(words, found)
    if as_json:
        print_json({**msgspec.to_builtins(found), "command": line})
    else:
        part = tune_part(found, line, cost)
        draw_answers(part.headlines, console())
        if part.table and part.table.rows:
            console().print()
            draw_table(part.table, console())
            note(part.table.says)
        for text in part.notes:
            note(text)
        next_step(line)


class Live:
    """A line now and then: how many are left, and who leads."""

    def __init__(self, budget: float) -> None:
        self._begin, self._budget, self._next = time.monotonic(), budget, 0.0

    def __call__(self, race: Knockout) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + 5.0
        standings = race.standings()
        left = len(race.contenders) - len(race.out) - len(race.failures)
        leads = f", {standings[0].name} leads" if standings else ""
        note(f"{now - self._begin:.0f} of {self._budget:.0f} s: {left} of {len(race.contenders)} left{leads}")
