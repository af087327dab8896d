"""Is it the loader, the batch, the threads? Each is answered by a counterfactual: the same step without it, measured in turns."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import msgspec

from lockstep.explain.evidence import Evidence
from lockstep.explain.finding import Finding
from lockstep.explain.speedup import crowded, known_cores, losses
from lockstep.explain.step import split
from lockstep.explain.words import ms, percent
from lockstep.placement import Placement
from lockstep.recipe import Augment
from lockstep.study.statistics import median_interval
from lockstep.ways import Way

# What is below is not worth anyone's time.
WORTH = 0.05


def answer(evidence: Evidence) -> list[Finding]:
    ways = evidence.ways
    base = ways.get("together") or ways.get("plain")
    if base is None:
        return [*_from_run(evidence)]
    others = [*_loader(evidence, ways, base), *_batch(evidence, ways, base)]
    threads = [*_threads(evidence, ways, base)]
    if crowded(evidence):
        # Threads that take turns make every call long, so all that saves calls seems to help: it is a symptom of theirs.
        most = max((each.cost for each in others), default=0.0)
        threads = [msgspec.structs.replace(each, cost=max(each.cost, most)) for each in threads]
    return [*threads, *others] or [_none(ways, base)]


def gain(way: Way, base: Way, samples: float = 1.0) -> tuple[float, float, float]:
    """The part of the base's time that is saved, with its interval over rounds; `samples`: how many times the base's work it does."""
    saved = [1 - a / samples / b for a, b in zip(way.by_round, base.by_round, strict=True)]
    between = median_interval(saved)
    middle = statistics.median(saved)
    return (middle, between.low, between.high) if between else (middle, middle, middle)


def _loader(evidence: Evidence, ways: dict[str, Way], base: Way) -> Iterator[Finding]:
    way = ways["no-data"]
    saved, low, high = gain(way, base)
    if saved < WORTH or low < 0:
        return
    on = augmentations(evidence)
    blame = (
        f"{', '.join(on)} on {base.samples} images a step"
        if on
        else f"reading and normalising {base.samples} images a step"
    )
    yield Finding(
        question="limits",
        verdict=f"the loader holds training up: without it a step would take {ms(way.seconds)} instead of {ms(base.seconds)}",
        why=f"{percent(saved)} of a step ({percent(low)} to {percent(high)}, n = {len(base.rounds)} rounds with one batch used again and again); it is {blame}",
        next=f"try it with less of {', '.join(on)}" if on else "use a smaller data type or image for the data set",
        cost=saved,
        figures={
            "cause": "loader",
            "saved": saved,
            "low": low,
            "high": high,
            "without_s": way.seconds,
            "step_s": base.seconds,
        },
    )


def _batch(evidence: Evidence, ways: dict[str, Way], base: Way) -> Iterator[Finding]:
    way = ways.get("double")
    if way is None:
        return
    saved, low, high = gain(way, base, samples=2)
    if saved < WORTH or low < 0:
        return
    plan = evidence.spec.plan
    more = f"micro_batch={2 * plan.micro_batch} (the same recipe, half the passes)"
    if plan.accumulation % 2:
        more = f"global_batch={2 * plan.global_batch} with lr_rule=linear or sqrt (another recipe: check its accuracy)"
    yield Finding(
        question="limits",
        verdict=f"the batch is small: with {way.samples} samples a rank instead of {base.samples}, a sample would take {percent(saved)} less time",
        why=f"{ms(way.seconds)} for {way.samples} samples against {ms(base.seconds)} for {base.samples} ({percent(low)} to {percent(high)} saved, n = {len(base.rounds)} rounds)",
        next=more,
        cost=saved,
        figures={
            "cause": "batch",
            "saved": saved,
            "low": low,
            "high": high,
            "double_s": way.seconds,
            "step_s": base.seconds,
        },
    )


def _threads(evidence: Evidence, ways: dict[str, Way], base: Way) -> Iterator[Finding]:
    too_many = crowded(evidence)
    way = ways.get("half-threads")
    saved, low, high = gain(way, base) if way else (0.0, 0.0, 0.0)
    lost = losses(ways)["contention"] / base.seconds if too_many and "apart" in ways else 0.0
    if max(saved, lost) < WORTH or (low < 0 and not too_many):
        return
    placement = evidence.spec.placement
    fitting = max(1, known_cores(evidence) // (base.ranks if placement.emulated else base.ranks // placement.hosts))
    threads = fitting if too_many else base.threads // 2
    measured = (
        ""
        if way is None
        else f"half of them save {percent(saved)} of a step ({percent(low)} to {percent(high)}, n = {len(base.rounds)} rounds)"
    )
    crowd = f"{base.ranks} ranks x {base.threads} threads share {known_cores(evidence)} cores" if too_many else ""
    yield Finding(
        question="limits",
        verdict=f"threads get into each other's way: threads={base.threads} is too many here",
        why="; ".join(
            text
            for text in (crowd, measured, f"working at once costs {percent(lost)} of a step" if lost else "")
            if text
        ),
        next=f"threads={threads}",
        cost=max(saved, lost),
        figures={
            "cause": "threads",
            "saved": saved,
            "low": low,
            "high": high,
            "contention": lost,
            "step_s": base.seconds,
        },
    )


def _none(ways: dict[str, Way], base: Way) -> Finding:
    tried = {"no-data": "no loader", "double": "twice the batch", "half-threads": "half the threads"}
    parts = {name: gain(ways[name], base, 2 if name == "double" else 1)[0] for name in tried if name in ways}
    return Finding(
        question="limits",
        verdict="neither the loader, nor the batch, nor the threads hold it up",
        why="saved by " + ", ".join(f"{tried[name]} {percent(saved)}" for name, saved in parts.items()),
        figures={"cause": None, **parts},
    )


def _from_run(evidence: Evidence) -> Iterator[Finding]:
    """Without a probe: what the clock says of the loader, and what can be counted."""
    if not len(evidence.ranks[0]):
        return
    means = split(evidence.ranks)
    step = statistics.fmean(part["total"] for part in means)
    data = statistics.fmean(part["data"] for part in means)
    measure = (
        "" if evidence.spec.options.script else f"; see what it is worth: lockstep explain {evidence.run.id} --measure"
    )
    if crowded(evidence):
        placement: Placement = evidence.spec.placement
        yield Finding(
            question="limits",
            verdict=f"there are more threads than cores: {placement.ranks} ranks x {placement.threads} threads on {known_cores(evidence)}",
            why="threads without a core of their own take turns; what that costs has not been measured",
            next=f"leave threads out{measure}",
            figures={"cause": "threads"},
        )
    if data > WORTH * step:
        on = augmentations(evidence)
        yield Finding(
            question="limits",
            verdict=f"the loader takes {percent(data / step)} of a step",
            why=f"{ms(data)} of {ms(step)} until the batch is there" + (f"; on: {', '.join(on)}" if on else ""),
            next=f"{'try it with less of ' + ', '.join(on) if on else 'make the batches in advance'}{measure}",
            cost=data / step,
            figures={"cause": "loader", "data_s": data, "step_s": step},
        )


def augmentations(evidence: Evidence) -> list[str]:
    """The settings that give the loader work."""
    chosen, default = msgspec.to_builtins(evidence.spec.recipe.augment), msgspec.to_builtins(Augment())
    on = [f"augment.{key}" for key in chosen if chosen[key] != default[key]]
    return on + (["regularize.mixup"] if evidence.spec.recipe.regularize.mixup else [])
