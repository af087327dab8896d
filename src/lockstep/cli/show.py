"""`lockstep show`: one run, its results, where the time went, every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lockstep.cli.output import console, json_option, print_json, print_table, styled
from lockstep.cli.plot import plot_option, print_run_plots, wanted
from lockstep.cli.run import runs_option
from lockstep.errors import InputError
from lockstep.run import Run, read_json, runs_root

# Lines of the table of operators.
MOST_OPERATORS = 25

EPILOG = """\b
Examples:
  lockstep show last
  lockstep show 20260101-1200 --ranks
  lockstep show runs/my-run --json
  lockstep show last --operators             of a run with --profile: torch's operators by their own time
"""


@click.command("show", epilog=EPILOG)
@click.argument("run", default="last")
@runs_option
@click.option("--ranks", is_flag=True, help="Show every rank by itself.")
@click.option("--operators", is_flag=True, help="Show the operators of the first rank that torch's profiler saw.")
@plot_option
@json_option
def command(run: str, runs: Path | None, ranks: bool, operators: bool, plot: bool | None, as_json: bool) -> None:
    """Show one run (an id, the beginning of one, a folder, or 'last')."""
    found = Run.find(run, runs_root(runs))
    if operators:
        _operators(found, as_json)
    elif as_json:
        print_json(document(found))
    else:
        print_run(found, ranks, wanted(plot))


def _operators(run: Run, as_json: bool) -> None:
    """What `lockstep run --profile` has left; the same columns as in torch's own table, which is beside it as text."""
    from lockstep.measure.profile import OPERATORS

    content = read_json(run.rank_folder(0) / OPERATORS)
    if content is None:
        raise InputError(f"run {run.id} has no table of operators: run it again with --profile 5")
    if as_json:
        print_json(content)
        return
    rows = content["operators"][:MOST_OPERATORS]
    print_table(
        ["operator", "self CPU %", "self CPU ms", "CPU total ms", "memory MB", "calls"],
        [
            [
                row["name"],
                f"{row['self_cpu_share']:.1%}",
                f"{row['self_cpu_us'] / 1e3:.2f}",
                f"{row['cpu_total_us'] / 1e3:.2f}",
                f"{row['cpu_memory_bytes'] / 1e6:.2f}",
                f"{row['calls']:,}",
            ]
            for row in rows
        ],
        right=range(1, 6),
    )
    last = content["first_step"] + content["steps"] - 1
    also = "".join(f" and the {name} between them" for name in dict.fromkeys(content["between"]))
    left = len(content["operators"]) - len(rows)
    more = f"; {left} more with --json" if left else ""
    console().print(f"rank 0, steps {content['first_step']} to {last}{also}, by self CPU time{more}")


def document(run: Run) -> dict[str, Any]:
    """All that is known of a run, as one JSON document."""
    import msgspec

    from lockstep.measure.phases import step_phases

    spec, status = run.spec(), run.status()
    return {
        "run": str(run.folder),
        "id": run.id,
        **status,
        **(run.summary() or {}),
        "epochs": run.epochs(),
        "plan": msgspec.to_builtins(spec.plan),
        "recipe": msgspec.to_builtins(spec.recipe),
        "placement": msgspec.to_builtins(spec.placement),
        "phases": step_phases(run),
        "ranks": [{"epochs": run.epochs(rank), **beat} for rank, beat in enumerate(run.rank_statuses())],
        "model_notes": {kind: run.model_notes(kind) for kind in ("remarks", "cautions")},
        "environment": run.environment(),
        "command": spec.command,
        "data_origin": spec.data_origin,
    }


def print_run(run: Run, ranks: bool, plot: bool = False) -> None:
    from lockstep.measure.phases import phases_line, step_phases
    from lockstep.placement import changes_mathematics, unknown_mathematics

    spec, status, summary = run.spec(), run.status(), run.summary()
    out = console()
    placement = spec.placement
    out.print(styled((run.id, "bold"), "  ", *_state(status)))
    out.print(
        f"{spec.recipe.model} on {spec.recipe.data}; {placement.launcher}, {placement.hosts} host(s) x "
        f"{placement.ranks // placement.hosts} rank(s) x {placement.threads} thread(s), {placement.backend}, {placement.strategy}"
    )
    out.print(spec.plan.line())
    if spec.plan.lr_note:
        out.print(spec.plan.lr_note)
    if changed := changes_mathematics(spec.placement, spec.recipe):
        out.print(styled(("changes the mathematics", "yellow"), f": {changed}"))
    if unknown := unknown_mathematics(spec.placement):
        out.print(styled(unknown))
    for line in model_lines(run):
        out.print(line)
    epochs = run.epochs()
    if epochs:
        print_table(
            ["epoch", "train loss", "train acc", "test loss", "test acc", "train s", "eval s", "images/s"],
            [
                [
                    f"{e['epoch']} (part)" if e.get("partial") else str(e["epoch"]),
                    number(e["train_loss"], ".4f"),
                    number(e["train_accuracy"], ".2%"),
                    number(e["test_loss"], ".4f"),
                    number(e["test_accuracy"], ".2%"),
                    f"{e['train_seconds']:.2f}",
                    f"{e['eval_seconds']:.2f}",
                    f"{e['images_per_second']:,.0f}",
                ]
                for e in epochs
            ],
            right=range(8),
        )
    phases = step_phases(run)
    if phases:
        out.print(phases_line(phases))
    if summary:
        out.print(styled(f"memory: {memory_text(summary)} peak growth a rank; ", _agreement(summary, spec.plan.ranks)))
        if summary.get("stopped_by"):
            out.print(f"stopped by {summary['stopped_by']} after step {summary['steps']}")
        for line in (_numbers_line(spec.recipe.precision, summary), _aside_line(summary)):
            if line:
                out.print(line)
    if ranks:
        _print_ranks(run, spec.plan.ranks)
    if plot:
        print_run_plots(run, phases)
    out.print(styled((str(run.folder), "dim")), soft_wrap=True)


def model_lines(run: Run) -> list[str]:
    """What was changed about a user's own model, and why ranks or micro batches may not compute what one process would."""
    plan, cautions = run.spec().plan, run.model_notes("cautions")
    divided = plan.ranks > 1 or plan.accumulation > 1
    return run.model_notes("remarks") + [f"warning: {caution}" for caution in cautions if divided]


def _numbers_line(precision: str, summary: dict[str, Any]) -> str:
    """What a 16-bit format has cost: overflow, underflow, lost updates."""
    numbers = summary.get("numbers")
    if not numbers:
        return ""
    scale = ""
    if "loss_scale" in numbers:
        scale = f"; {numbers['skipped_steps']} steps skipped for overflow, loss scale now {numbers['loss_scale']:g}"
    return (
        f"{precision}, of {numbers['looks']} steps looked at: {numbers['gradient_not_finite_share']:.2%} of gradients not finite, "
        f"{numbers['gradient_zero_share']:.2%} zero, {numbers['gradient_subnormal_share']:.2%} subnormal; "
        f"{numbers['lost_update_share']:.2%} of updates lost to rounding{scale}"
    )


def _aside_line(summary: dict[str, Any]) -> str:
    parts = [
        f"{word} {summary[key]:.2f} s"
        for word, key in (("compiling took", "compile_seconds"), ("checkpoints took", "checkpoint_seconds"))
        if summary.get(key)
    ]
    return "; ".join(parts)


def number(value: float | None, form: str) -> str:
    """A result, or a dash where a loop of the user's own did not say."""
    return "–" if value is None else format(value, form)


def _state(status: dict[str, Any]) -> tuple[tuple[str, str], str]:
    colour = {"done": "green", "failed": "red", "cancelled": "yellow", "stalled": "red"}.get(status["state"], "cyan")
    cause = f": {status['cause']}" if status.get("cause") else ""
    return (status["state"], colour), cause


def memory_text(summary: dict[str, Any]) -> str:
    known = [value for value in summary["memory_growth_bytes"] if value is not None]
    return f"{max(known) / 1e6:.1f} MB" if known else "unknown"


def _agreement(summary: dict[str, Any], ranks: int) -> str | tuple[str, str]:
    if ranks == 1:
        return "one rank"
    return (
        "all ranks ended with the same weights"
        if summary["ranks_agree"]
        else ("the ranks ended with DIFFERENT weights", "red")
    )


def _print_ranks(run: Run, ranks: int) -> None:
    from lockstep.measure.phases import rank_phases

    rows = []
    for rank in range(ranks):
        epochs, phases = run.epochs(rank), rank_phases(run, rank)
        last = epochs[-1] if epochs else {}
        rows.append(
            [
                str(rank),
                number(last.get("train_loss"), ".4f"),
                number(last.get("train_accuracy"), ".2%"),
                f"{sum(e['train_seconds'] for e in epochs):.2f}" if epochs else "–",
                *(
                    f"{phases[name] / 1e3:.0f}" if phases else "–"
                    for name in ("data", "forward", "backward", "exchange", "optimizer", "other", "total")
                ),
            ]
        )
    headers = [
        "rank",
        "train loss",
        "train acc",
        "train s",
        "data µs",
        "forward µs",
        "backward µs",
        "exchange µs",
        "optimizer µs",
        "other µs",
        "step µs",
    ]
    print_table(headers, rows, right=range(len(headers)))
