"""`lockstep show`: one run, its results, where the time went, every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lockstep import shapes
from lockstep.cli.output import console, json_option, print_json, print_table, styled
from lockstep.cli.plot import plot_option, print_run_plots, wanted
from lockstep.cli.run import runs_option
from lockstep.errors import InputError
from lockstep.reading import Damaged, read_record
from lockstep.run import DAMAGED, Run, runs_root

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

    try:
        content = read_record(run.rank_folder(0) / OPERATORS, shapes.Operators)
    except Damaged as error:
        raise Damaged(f"run {run.id} is damaged: ranks/0000/{error}") from None
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
    from lockstep.measure.records import damage

    spec, status = run.spec(), run.status()
    return {
        "run": str(run.folder),
        "id": run.id,
        **status,
        **(run.summary() or {}),
        "damaged": [*run.damage(), *damage(run)],
        "epochs": run.epochs(),
        "plan": msgspec.to_builtins(spec.plan),
        "recipe": msgspec.to_builtins(spec.recipe),
        "placement": msgspec.to_builtins(spec.placement),
        "phases": step_phases(run),
        "ranks": [{"epochs": run.epochs(beat["rank"]), **beat} for beat in run.rank_statuses()],
        "model_notes": {kind: run.model_notes(kind) for kind in ("remarks", "cautions")},
        "environment": run.environment(),
        "command": spec.command,
        "data_origin": spec.data_origin,
    }


def print_run(run: Run, ranks: bool, plot: bool = False) -> None:
    from lockstep.measure.phases import phases_line, step_phases
    from lockstep.measure.records import damage
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
                    number(e.get("train_loss"), ".4f"),
                    number(e.get("train_accuracy"), ".2%"),
                    number(e.get("test_loss"), ".4f"),
                    number(e.get("test_accuracy"), ".2%"),
                    number(e.get("train_seconds"), ".2f"),
                    number(e.get("eval_seconds"), ".2f"),
                    number(e.get("images_per_second"), ",.0f"),
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
            out.print(f"stopped by {summary['stopped_by']} after step {summary.get('steps')}")
        for line in (_numbers_line(spec.recipe.precision, summary), _aside_line(summary)):
            if line:
                out.print(line)
    if ranks:
        _print_ranks(run, spec.plan.ranks)
    for text in damage(run):
        out.print(styled(("damaged", "red"), f"  {text}: left out"), soft_wrap=True)
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
    if numbers.get("loss_scale") is not None:
        scale = f"; {numbers.get('skipped_steps')} steps skipped for overflow, loss scale now {numbers['loss_scale']:g}"
    kinds = ("gradient_not_finite_share", "gradient_zero_share", "gradient_subnormal_share", "lost_update_share")
    infinite, zero, subnormal, lost = (number(numbers.get(kind), ".2%") for kind in kinds)
    return (
        f"{precision}, of {numbers.get('looks', '–')} steps looked at: {infinite} of gradients not finite, {zero} zero, "
        f"{subnormal} subnormal; {lost} of updates lost to rounding{scale}"
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
    colour = {"done": "green", "failed": "red", "cancelled": "yellow", "stalled": "red", DAMAGED: "red"}.get(
        status["state"], "cyan"
    )
    cause = f": {status['cause']}" if status.get("cause") else ""
    return (status["state"], colour), cause


def memory_text(summary: dict[str, Any]) -> str:
    known = [value for value in summary.get("memory_growth_bytes", ()) if value is not None]
    return f"{max(known) / 1e6:.1f} MB" if known else "unknown"


def _agreement(summary: dict[str, Any], ranks: int) -> str | tuple[str, str]:
    if ranks == 1:
        return "one rank"
    return (
        "all ranks ended with the same weights"
        if summary.get("ranks_agree")
        else "whether the ranks agree is not known"
        if summary.get("ranks_agree") is None
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
                f"{sum(e.get('train_seconds') or 0.0 for e in epochs):.2f}" if epochs else "–",
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
