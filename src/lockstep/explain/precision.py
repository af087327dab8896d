"""Is mixed precision worth it here? The same recipe and placement in both number formats: time, memory, accuracy, overflows."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from lockstep.explain.evidence import Evidence
from lockstep.explain.finding import Finding
from lockstep.explain.twins import same_recipe
from lockstep.machine.formats import cpu_support, precision_line
from lockstep.measure.view import RunView
from lockstep.metrics import main_metric, metric_of, value
from lockstep.statistics import Comparison, compare
from lockstep.units import counted


def answer(evidence: Evidence) -> Iterator[Finding]:
    if evidence.spec.options.attached is not None:  # nor is its number format
        return
    mine = evidence.spec.recipe.precision
    alike = [run for run in (evidence.run, *evidence.peers) if _alike(run, evidence)]
    formats = sorted({run.spec().recipe.precision for run in alike} - {"fp32"})
    full = [run for run in alike if run.spec().recipe.precision == "fp32"]
    if full and formats:
        chosen = [mine] if mine in formats else formats
        for name in chosen:
            yield _compared(name, [r for r in alike if r.spec().recipe.precision == name], full, evidence)
    elif mine != "fp32":
        yield Finding(
            verdict=f"whether {mine} is worth it is not known: there is no fp32 run of this recipe and placement",
            why=f"{precision_line(mine, evidence.spec.placement)}{_numbers(evidence.summary)}",
            next="run it with precision=fp32 too, or: lockstep study run precision",
        )


def _compared(name: str, mixed: Sequence[RunView], full: Sequence[RunView], evidence: Evidence) -> Finding:
    pairs = _pairs(mixed, full)
    judged = main_metric(evidence.spec.recipe)
    time, accuracy = (compare(*_values(pairs, metric), metric_of(metric).kind) for metric in ("seconds", judged))
    memory = _ratio(pairs, "memory")
    hardware = precision_line(name, evidence.spec.placement)
    if time.effect is None:
        return Finding(
            verdict=f"whether {name} is worth it is not known: no {name} and fp32 run have the same seed",
            why=hardware,
            next="run both with the same seeds: lockstep study run precision",
        )
    verdict, gains = _judged(name, time, accuracy)
    accuracy_text = (
        "not tested"
        if accuracy.effect is None
        else f"{metric_of(judged).effect(accuracy.effect, None, None)} ({accuracy.verdict})"
    )
    # What the other format would save: nothing where it is not settled, or where accuracy pays for it.
    saved = 0.0
    if evidence.spec.recipe.precision == "fp32" and gains:
        saved = 1 - time.effect
    elif evidence.spec.recipe.precision != "fp32" and time.verdict == "slower":
        saved = 1 - 1 / time.effect
    return Finding(
        verdict=verdict,
        why=f"{hardware}; time {time.effect:.3f}x, memory {'?' if memory is None else f'{memory:.2f}x'}, "
        f"{judged} {accuracy_text}, n = {counted(time.n, 'pair')} of one seed{_numbers(mixed[0].summary() or {})}",
        next=f"precision={name if gains else 'fp32'}"
        if time.settled
        else "more seeds: lockstep study run precision repeats=5",
        cost=saved,
        figures={
            "format": name,
            "time_ratio": time.effect,
            "time_verdict": time.verdict,
            "memory_ratio": memory,
            "accuracy_difference": accuracy.effect,
            "accuracy_verdict": accuracy.verdict,
            "pairs": time.n,
            "hardware": cpu_support(),
        },
    )


def _judged(name: str, time: Comparison, accuracy: Comparison) -> tuple[str, bool]:
    """The verdict from the figures, and whether there is a gain."""
    if not time.settled:
        return f"{name} seems to take {time.effect:.2f} times as long as fp32 here: not settled", False
    if time.verdict == "the same":
        return f"{name} takes as long as fp32 here: it saves no time", False
    takes = f"{name} takes {time.effect:.2f} times as long as fp32 here"
    if time.verdict == "slower":
        return f"{takes}: not worth it", False
    if accuracy.verdict == "worse":
        return f"{takes}, and its accuracy is worse: not worth it", False
    return f"{takes}: worth it", True


def _alike(run: RunView, evidence: Evidence) -> bool:
    """The same recipe and placement in any number format."""
    spec = run.spec()
    return spec.placement == evidence.spec.placement and same_recipe(spec, evidence.spec, ("precision",))


def _pairs(ours: Sequence[RunView], theirs: Sequence[RunView]) -> list[tuple[RunView, RunView]]:
    """Runs paired one to one by seed, in the order of time: a run without a partner is not used."""
    left: dict[int, list[RunView]] = {}
    for each in sorted(theirs, key=lambda each: each.spec().created):
        left.setdefault(each.spec().recipe.seed, []).append(each)
    found = []
    for each in sorted(ours, key=lambda each: each.spec().created):
        if left.get(each.spec().recipe.seed):
            found.append((each, left[each.spec().recipe.seed].pop(0)))
    return found


def _values(pairs: Sequence[tuple[RunView, RunView]], metric: str) -> tuple[list[float], list[float]]:
    known = [(value(a, metric, None), value(b, metric, None)) for a, b in pairs]
    both = [(a, b) for a, b in known if a is not None and b is not None]
    return [a for a, _ in both], [b for _, b in both]


def _ratio(pairs: Sequence[tuple[RunView, RunView]], metric: str) -> float | None:
    ours, theirs = _values(pairs, metric)
    ratios = [a / b for a, b in zip(ours, theirs, strict=True) if b]
    return statistics.median(ratios) if ratios else None


def _numbers(summary: dict[str, Any]) -> str:
    """The counted overflows, underflows and lost updates."""
    numbers = summary.get("numbers")
    if not numbers:
        return ""
    return "; counted: " + ", ".join(
        f"{key.replace('_', ' ')} {_count(value)}" for key, value in numbers.items() if isinstance(value, int | float)
    )


def _count(value: Any) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.3g}"
