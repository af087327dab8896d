"""`lockstep run`: train a recipe on a placement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lockstep.cli.options import (
    complete_run,
    data_root_option,
    json_option,
    real,
    runs_option,
    whole,
    words_argument,
)
from lockstep.cli.output import note, print_json
from lockstep.cli.plan import show_plan
from lockstep.run import Run, runs_root

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
  lockstep run launcher=slurm hosts=2 ranks=4 --detach    a job that goes on; then: lockstep follow last
  lockstep run ranks=4 hosts=2 rendezvous=10.0.0.1:29500 --dry-run

Recipe keys (what is computed): model, model_args.*, data, normalize, augment.*, train_limit, test_limit,
shuffle, global_batch, batch_per_rank, epochs, max_steps, optimizer.*, schedule.*, lr_rule, lr_batch,
precision, regularize.*, early_stopping.*, compile, seed

Placement keys (where): launcher, hosts, link, ranks, threads, pin, device, backend, strategy, ddp.*,
local_sgd.*, zero, micro_batch, accumulation, eval_batch, memory_format, rendezvous, timeout_s,
max_restarts, mpi, slurm.*

docs/recipes.md and docs/placements.md say what each means.
"""


@click.command("run", epilog=EPILOG)
@words_argument
@click.option("--name", help="Name of the run folder (default: made from time, model and placement).")
@runs_option
@data_root_option
@click.option(
    "--time-limit",
    "time_limit_s",
    type=real(0, open_=True),
    help="Stop all ranks after N seconds.",
)
@click.option("--checkpoint-every", type=whole(1), help="Keep a checkpoint every N epochs.")
@click.option("--checkpoint-steps", type=whole(1), help="Keep a checkpoint every N steps, too.")
@click.option("--keep", "keep_checkpoints", type=whole(1), default=2, help="How many.")
@click.option(
    "--resume",
    metavar="RUN",
    shell_complete=complete_run,
    help="Go on from the last checkpoint of a run, in a folder of its own.",
)
@click.option("--trace", type=click.IntRange(1, 1000), help="Keep the timeline of N steps after warm-up.")
@click.option("--profile", type=click.IntRange(1, 100), help="Run torch's profiler over N steps: a table of operators.")
@click.option("--host-index", type=whole(0, 100_000), help="With hosts=N: which of them this one is, 0 to N-1.")
@click.option(
    "--detach",
    is_flag=True,
    help="With launcher=slurm: submit the job and leave it; 'lockstep follow' goes back to it.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Show what would run, and train nothing. Data that is not here is fetched: the plan needs its size.",
)
@click.option("--quiet", is_flag=True, help="No progress.")
@json_option
def command(
    words: tuple[str, ...],
    name: str | None,
    runs: Path | None,
    resume: str | None,
    host_index: int | None,
    detach: bool,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Train a recipe on a placement; a run folder comes out."""
    from lockstep.launch import specify
    from lockstep.launch.api import check, requested, train
    from lockstep.machine.crowded import taken
    from lockstep.report.progress import ProgressLine

    earlier = Run.find(resume, runs_root(runs)) if resume else None
    recipe, placement, chosen = requested(words, {}, earlier, **options)
    if dry_run:
        folder, spec = specify(recipe, placement, chosen, runs, name, taken())
        check(spec, note)
        show_plan(words, folder, spec, as_json)
        return
    with ProgressLine(quiet=quiet) as progress:
        run = train(
            recipe,
            placement,
            chosen,
            runs=runs,
            name=name,
            host_index=host_index,
            detach=detach,
            tell=note,
            quiet=quiet,
            progress=progress,
        )
    if detach and not as_json:
        return
    if host_index:
        return  # the first host has the results
    from lockstep.cli.show import document, next_of, print_run
    from lockstep.measure.view import view
    from lockstep.report.run import model_lines

    if as_json:
        for line in model_lines(view(run)):
            note(line)
        print_json(document(run))
    else:
        print_run(run, ranks=False)
        if not quiet:
            next_of(run, runs)
