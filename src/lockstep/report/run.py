"""One run by itself: the figures that people look for first, its epochs, its ranks, and what to know about it."""

from __future__ import annotations

import shlex
from typing import Any

from lockstep import units
from lockstep.inside.layout import BESIDE
from lockstep.machine import starving
from lockstep.measure.phases import NAMES, Parts, last_in, phases_line, told_apart
from lockstep.measure.view import RunView
from lockstep.metrics import learned_keys, metric_of, recorded
from lockstep.placement import changes_mathematics, unknown_mathematics
from lockstep.report.views import Cell, Table

TIMED_IN_EPOCH = ("train_seconds", "eval_seconds", "images_per_second")
Facts = list[tuple[str, str]]
# Names that a script has logged; the plots have all of them.
MOST_LOGGED = 6


def facts(run: RunView) -> Facts:
    spec, placement, plan, summary = run.spec(), run.spec().placement, run.spec().plan, run.summary() or {}
    sizes = (
        (placement.hosts, "host"),
        (placement.ranks // placement.hosts, "rank"),
        (placement.threads or 1, "thread"),
    )
    place = " x ".join(units.counted(*size) for size in sizes)
    phases = run.phases()
    last = f" (last batch {plan.last_batch})" if plan.last_batch != plan.global_batch else ""
    by_epoch = f"{plan.steps_per_epoch:,} an epoch{last}, " if plan.steps_per_epoch else ""
    figures = ("seconds", "images_per_second", "memory_of_a_rank")
    learned = [
        key
        for key in learned_keys(spec.recipe)
        if key.startswith("test_") and (key != "test_loss" or summary.get("test_accuracy") is None)
    ]
    found = [
        ("state", run.state),
        ("cause", run.cause),
        ("command", shlex.join(spec.options.attached or [])),
        ("model and data", "" if spec.options.attached else f"{spec.recipe.model} on {spec.recipe.data}"),
        ("placement", f"{place}, {placement.launcher}, {placement.backend}, {placement.strategy}"),
        ("global batch", plan.batch_text()),
        ("divided in the end", " + ".join(map(str, summary.get("shares") or [])) if placement.shares == "auto" else ""),
        ("steps", f"{by_epoch}{plan.total_steps:,} in all"),
        *((recorded(key).label, recorded(key).text(summary.get(key))) for key in learned),
        *((metric_of(name).label, metric_of(name).text(metric_of(name).of(run, None))) for name in figures),
        ("a step takes", phases_line(phases, run.split()) if phases else ""),
        ("other is", _named(run, phases) if phases else ""),
        ("logged", _logged(run)),
        (
            "stopped by",
            f"{summary['stopped_by']} after step {summary.get('steps')}" if summary.get("stopped_by") else "",
        ),
        *((word, units.duration(summary[key])) for word, key in ASIDE if summary.get(key)),
        ("weights", _agreement(plan.ranks, summary)),
    ]
    return [(label, value) for label, value in found if value not in ("–", "")]


def attached_lines(run: RunView, summary: dict[str, Any], phases: dict[str, Any]) -> list[str]:
    """An attached command in a few lines: the answer first, then the split of a step, then what lies between the steps."""
    step = phases["step_ns"]["mean"] / 1e9
    mean = _adding_up(told_apart(phases, run.split()), step)
    steps, ranks = int(summary.get("steps") or 0), run.ranks
    names = [name for name in NAMES if name in mean]
    largest = max(names, key=mean.__getitem__)
    on = f" on {ranks} ranks" if ranks > 1 else ""
    most = f"; most of it is {largest} ({units.percent(mean[largest] / mean['total'])})"
    starved = starved_line(run)  # no phase is blamed then
    found = [f"lockstep: {units.counted(steps, 'step')}{on}, {units.duration(step)} a step{'' if starved else most}"]
    found += [starved] if starved else []
    found += [f"  {name:<10}{units.duration(mean[name]):>10}  {mean[name] / mean['total']:>6.1%}" for name in names]
    found += [
        f"    {name:<10}{units.duration(seconds):>8}  {seconds / mean['total']:>6.1%}"
        for name, seconds in named_other(run, mean["other"], mean["total"])
    ]
    between = [f"{what} {units.duration(summary[key])}" for what, key in BETWEEN if summary.get(key)]
    found += [f"between the steps: {', '.join(between)}"] if between else []
    hooks = float(summary.get("hook_seconds") or 0.0)
    if hooks and steps:
        share = hooks / float(summary["train_seconds"])
        found.append(f"the hooks took at least {units.duration(hooks / steps)} of a step ({units.percent(share)})")
    if mean["other"] > OTHER_WORTH * mean["total"] and not run.attached().get("loader"):
        found.append("other: no DataLoader was seen, so batches that the script makes by hand are in it")
    if not run.spec().plan.global_batch:
        found.append(f"global batch: {run.spec().plan.batch_text()}")
    return found


def _adding_up(parts: Parts, step: float) -> Parts:
    """A step takes as long as its slowest rank: what that is beyond the mean of the ranks is waiting, too."""
    if "waiting" not in parts:
        return parts
    beyond = max(0.0, step - parts["total"])
    return {**parts, "waiting": parts["waiting"] + beyond, "total": parts["total"] + beyond}


def _named(run: RunView, phases: dict[str, Any]) -> str:
    mean = phases["mean_ns"]
    parts = named_other(run, mean["other"] / 1e9, mean["total"] / 1e9)
    return ", ".join(f"{name} {1e9 * seconds / mean['total']:.1%}" for name, seconds in parts)


def _logged(run: RunView) -> str:
    """The newest value of each name that an attached script has logged."""
    logged = run.logged()
    shown = ", ".join(f"{each.name} {each.values[-1]:.4g}" for each in logged[:MOST_LOGGED])
    more = f", and {len(logged) - MOST_LOGGED} more" if len(logged) > MOST_LOGGED else ""
    return f"{shown}{more}; at step {max(each.steps[-1] for each in logged):,}" if logged else ""


def named_other(run: RunView, other: float, step: float) -> list[tuple[str, float]]:
    """What is known of a step's "other", the longest first, and what has no name: together they are all of it."""
    named = {name: seconds for name, seconds in run.beside().items() if name in BESIDE and seconds > SHOWN * step}
    if not named:
        return []
    ordered = sorted(named.items(), key=lambda part: -part[1])
    return [*((NAMED[name], seconds) for name, seconds in ordered), ("no name", max(0.0, other - sum(named.values())))]


# From this share on, people ask what it is; a smaller one than the second is not shown.
OTHER_WORTH, SHOWN = 0.05, 0.0005
NAMED = {
    **{name: name for name in BESIDE},
    "progress": "progress bar",
    "collecting": "garbage collector",
}
BETWEEN = (("evaluation", "eval_seconds"), ("checkpoints", "checkpoint_seconds"))
ASIDE = (
    ("compiling took", "compile_seconds"),
    ("checkpoints took", "checkpoint_seconds"),
    ("our hooks took", "hook_seconds"),
)


def _agreement(ranks: int, summary: dict[str, Any]) -> str:
    if ranks == 1 or not summary:
        return ""
    known = {
        True: "the same on all ranks",
        False: "DIFFERENT between ranks",
        None: "whether the ranks agree is not known",
    }
    return known[summary.get("ranks_agree")]


def notes(run: RunView) -> list[str]:
    spec = run.spec()
    changed = changes_mathematics(spec.placement, spec.recipe)
    found = [
        starved_line(run),
        spec.plan.lr_note,
        f"changes the mathematics: {changed}" if changed else "",
        None if spec.options.attached else unknown_mathematics(spec.placement),
        *model_lines(run),
        _numbers(spec.recipe.precision, (run.summary() or {}).get("numbers")),
    ]
    return [note for note in found if note]


def starved_line(run: RunView) -> str:
    """That a run had too little of its cores for its times to be believed; empty where it had enough, or where that is not known."""
    had = run.cores_had
    if had is None or not starving.starved(had):
        return ""
    return f"{starving.sentence(had)}; its times are {starving.DOUBT}; {starving.ADVICE}"


def model_lines(run: RunView) -> list[str]:
    """What was changed about a user's own model, and why ranks or micro batches may not compute what one process would."""
    plan, cautions = run.spec().plan, run.model_notes("cautions")
    divided = plan.ranks > 1 or plan.accumulation > 1
    return run.model_notes("remarks") + [f"warning: {caution}" for caution in cautions if divided]


def _numbers(precision: str, numbers: dict[str, Any] | None) -> str:
    """What a 16-bit format has cost: overflow, underflow, lost updates."""
    if not numbers:
        return ""
    scale = ""
    if numbers.get("loss_scale") is not None:
        scale = f"; {numbers.get('skipped_steps')} steps skipped for overflow, loss scale now {numbers['loss_scale']:g}"
    kinds = ("gradient_not_finite_share", "gradient_zero_share", "gradient_subnormal_share", "lost_update_share")
    infinite, zero, subnormal, lost = (units.text(numbers.get(kind), "percent") for kind in kinds)
    return (
        f"{precision}, of {numbers.get('looks', '–')} steps looked at: {infinite} of gradients not finite, {zero} zero, "
        f"{subnormal} subnormal; {lost} of updates lost to rounding{scale}"
    )


def epochs(run: RunView) -> Table | None:
    shown = [*learned_keys(run.spec().recipe), *TIMED_IN_EPOCH]
    rows = [
        [
            Cell(text=f"{each['epoch']} (part)" if each.get("partial") else str(each["epoch"]), value=each["epoch"]),
            *(Cell(text=recorded(name).text(each.get(name)), value=each.get(name)) for name in shown),
        ]
        for each in run.epochs()
    ]
    if not rows:
        return None
    return Table(
        id="epochs",
        title="Epochs",
        says="",
        columns=["epoch", *(recorded(name).heading for name in shown)],
        rows=rows,
        right=list(range(len(shown) + 1)),
        spare=[1 + shown.index(name) for name in ("eval_seconds", "train_loss", "train_accuracy") if name in shown],
    )


def ranks(run: RunView) -> Table | None:
    """Where a step of each rank goes, and the longest of each part."""
    parts = run.split()
    if not parts:
        return None
    shown = [name for name in (*NAMES, "total") if any(part[name] for part in parts)]
    last = [name for name in learned_keys(run.spec().recipe) if name.startswith("train_")]
    shares = last_in(run.after_warmup()) if "waiting" in shown else []
    rows = []
    for rank, part in enumerate(parts):
        ended = (run.epochs(rank) or [{}])[-1]
        rows.append(
            [
                Cell(text=str(rank), value=rank),
                *_times(part, shown),
                *(Cell(text=f"{share:.0%}", value=share) for share in shares[rank : rank + 1]),
                *(Cell(text=recorded(name).text(ended.get(name)), value=ended.get(name)) for name in last),
            ]
        )
    if len(parts) > 1:
        longest = {name: max(part[name] for part in parts) for name in shown}
        rows.append([Cell(text="longest"), *_times(longest, shown), *(Cell(text="") for _ in [*shares[:1], *last])])
    columns = ["rank", *("step" if name == "total" else name for name in shown), *(["came last"] if shares else [])]
    columns += [recorded(name).heading for name in last]
    return Table(
        id="ranks",
        title="Ranks",
        says="Mean time of each phase over the steps after warm-up, in how many of them the others waited for this rank, and the result of the "
        "last epoch on the rank's own samples.",
        columns=columns,
        rows=rows,
        right=list(range(len(columns))),
        spare=[
            *range(len(columns) - len(last), len(columns)),
            *(1 + shown.index(name) for name in ("data", "other") if name in shown),
        ],
    )


def _times(part: Parts, names: list[str]) -> list[Cell]:
    return [Cell(text=units.duration(part[name]), value=part[name]) for name in names]
