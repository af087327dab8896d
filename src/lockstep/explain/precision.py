"""Is mixed precision worth it here? The same recipe and placement in both number formats: time, memory, accuracy, overflows."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

from lockstep.explain.accuracy import same_recipe
from lockstep.explain.evidence import Evidence
from lockstep.explain.finding import Finding
from lockstep.explain.words import points
from lockstep.machine.formats import cpu_support, precision_line
from lockstep.placement import Placement
from lockstep.run import Run
from lockstep.study.measures import Sample, sample, value
from lockstep.study.statistics import Comparison, compare

FREE = ("seed", "batch_per_rank", "precision")


def answer(evidence: Evidence) -> list[Finding]:
    mine = evidence.spec.recipe.precision
    alike = [run for run in (evidence.run, *evidence.peers) if _alike(run, evidence)]
    formats = sorted({run.spec().recipe.precision for run in alike} - {"fp32"})
    full = [run for run in alike if run.spec().recipe.precision == "fp32"]
    if full and formats:
        chosen = [mine] if mine in formats else formats
        return [
            _compared(name, [r for r in alike if r.spec().recipe.precision == name], full, evidence) for name in chosen
        ]
    if mine == "fp32":
        return []
    return [
        Finding(
            question="precision",
            verdict=f"whether {mine} is worth it is not known: there is no fp32 run of this recipe and placement",
            why=f"{precision_line(mine, evidence.spec.placement)}{_numbers(evidence.summary)}",
            next="run it with precision=fp32 too, or: lockstep study run precision",
        )
    ]


def _compared(name: str, mixed: Sequence[Run], full: Sequence[Run], evidence: Evidence) -> Finding:
    pairs = _pairs([sample(run, None) for run in mixed], [sample(run, None) for run in full])
    time = compare(*_values(pairs, "seconds"), "time")
    accuracy = compare(*_values(pairs, "accuracy"), "accuracy")
    memory = _ratio(pairs, "memory")
    hardware = precision_line(name, evidence.spec.placement)
    if time.effect is None:
        return Finding(
            question="precision",
            verdict=f"whether {name} is worth it is not known: no {name} and fp32 run have the same seed",
            why=hardware,
            next="run both with the same seeds: lockstep study run precision",
        )
    verdict, gains = _judged(name, time, accuracy)
    accuracy_text = "not tested" if accuracy.effect is None else f"{points(accuracy.effect)} ({accuracy.verdict})"
    saved = 1 - time.effect if time.verdict in ("faster", "slower") else 0.0
    return Finding(
        question="precision",
        verdict=verdict,
        why=f"{hardware}; time {time.effect:.3f}x, memory {'?' if memory is None else f'{memory:.2f}x'}, "
        f"accuracy {accuracy_text}, n = {time.n} pair(s) of one seed{_numbers(mixed[0].summary() or {})}",
        next=f"precision={name if gains else 'fp32'}"
        if time.settled
        else "more seeds: lockstep study run precision repeats=5",
        cost=max(0.0, saved if evidence.spec.recipe.precision == "fp32" else -saved / time.effect),
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
    """What the figures come to, and whether it gains anything."""
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


def _alike(run: Run, evidence: Evidence) -> bool:
    """The same recipe and place, whatever the number format."""
    spec = run.spec()
    return _place(spec.placement) == _place(evidence.spec.placement) and same_recipe(spec, evidence.spec, FREE)


def _place(placement: Placement) -> dict[str, Any]:
    return dict(msgspec.to_builtins(placement))


def _pairs(ours: Sequence[Sample], theirs: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    """Runs of one seed, one to one, in the order of time: a run that has no partner of its own is no evidence."""
    left: dict[int, list[Sample]] = {}
    for each in sorted(theirs, key=lambda each: each.spec.created):
        left.setdefault(each.seed, []).append(each)
    found = []
    for each in sorted(ours, key=lambda each: each.spec.created):
        if left.get(each.seed):
            found.append((each, left[each.seed].pop(0)))
    return found


def _values(pairs: Sequence[tuple[Sample, Sample]], metric: str) -> tuple[list[float], list[float]]:
    known = [(value(a, metric, None), value(b, metric, None)) for a, b in pairs]
    both = [(a, b) for a, b in known if a is not None and b is not None]
    return [a for a, _ in both], [b for _, b in both]


def _ratio(pairs: Sequence[tuple[Sample, Sample]], metric: str) -> float | None:
    ours, theirs = _values(pairs, metric)
    ratios = [a / b for a, b in zip(ours, theirs, strict=True) if b]
    return statistics.median(ratios) if ratios else None


def _numbers(summary: dict[str, Any]) -> str:
    """What was counted of 16-bit trouble."""
    numbers = summary.get("numbers")
    if not numbers:
        return ""
    return "; counted: " + ", ".join(
        f"{key.replace('_', ' ')} {_count(value)}" for key, value in numbers.items() if isinstance(value, int | float)
    )


def _count(value: Any) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.3g}"
