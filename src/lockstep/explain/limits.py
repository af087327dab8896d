"""Is it the loader, the batch, the threads? Each is answered by a counterfactual: the same step without it, measured in turns."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from lockstep.explain.evidence import Evidence
from lockstep.explain.finding import Finding
from lockstep.explain.speedup import crowded, known_cores, losses
from lockstep.recipe import Augment
from lockstep.statistics import median_interval
from lockstep.units import duration, percent
from lockstep.ways import Way

# A smaller saving is not worth reporting.
WORTH = 0.05


def answer(evidence: Evidence) -> Iterator[Finding]:
    ways = evidence.ways
    base = ways.get("together") or ways.get("plain")
    if base is None:
        yield from _from_run(evidence)
        return
    others = [*_loader(evidence, ways, base), *_batch(evidence, ways, base)]
    threads = [*_threads(evidence, ways, base)]
    if crowded(evidence):
        # Threads that take turns make every call slow, so whatever saves calls seems to help: that is a symptom of too many threads.
        most = max((each.cost for each in others), default=0.0)
        threads = [msgspec.structs.replace(each, cost=max(each.cost, most)) for each in threads]
    yield from [*threads, *others] or [_none(ways, base)]


class Gain(NamedTuple):
    """The share of the base's time that is saved, with its interval over rounds."""

    saved: float = 0.0
    low: float = 0.0
    high: float = 0.0

    @property
    def worth(self) -> bool:
        return self.saved >= WORTH and self.low >= 0


def gain(way: Way, base: Way, samples: float = 1.0) -> Gain:
    """`samples`: the work of `way` as a multiple of the base's."""
    saved = [1 - a / samples / b for a, b in zip(way.by_round, base.by_round, strict=True)]
    between = median_interval(saved)
    median = statistics.median(saved)
    return Gain(median, between.low, between.high) if between else Gain(median, median, median)


def _loader(evidence: Evidence, ways: dict[str, Way], base: Way) -> Iterator[Finding]:
    way = ways["no-data"]
    found = gain(way, base)
    if not found.worth:
        return
    on = augmentations(evidence)
    blame = (
        f"{', '.join(on)} on {base.samples} images a step"
        if on
        else f"reading and normalising {base.samples} images a step"
    )
    yield Finding(
        verdict=f"the loader holds training up: without it a step would take {duration(way.seconds)} instead of {duration(base.seconds)}",
        why=f"{percent(found.saved)} of a step ({percent(found.low)} to {percent(found.high)}, n = {len(base.rounds)} rounds with one batch used again and again); it is {blame}",
        next=f"try it with less of {', '.join(on)}" if on else "use a smaller data type or image for the data set",
        cost=found.saved,
        figures={"cause": "loader", **found._asdict(), "without_s": way.seconds, "step_s": base.seconds},
    )


def _batch(evidence: Evidence, ways: dict[str, Way], base: Way) -> Iterator[Finding]:
    way = ways.get("double")
    if way is None:
        return
    found = gain(way, base, samples=2)
    if not found.worth:
        return
    plan = evidence.spec.plan
    more = f"micro_batch={2 * plan.micro_batch} (the same recipe, half the passes)"
    if plan.accumulation % 2:
        more = f"global_batch={2 * plan.global_batch} with lr_rule=linear or sqrt (another recipe: check its accuracy)"
    yield Finding(
        verdict=f"the batch is small: with {way.samples} samples a rank instead of {base.samples}, a sample would take {percent(found.saved)} less time",
        why=f"{duration(way.seconds)} for {way.samples} samples against {duration(base.seconds)} for {base.samples} ({percent(found.low)} to {percent(found.high)} saved, n = {len(base.rounds)} rounds)",
        next=more,
        cost=found.saved,
        figures={"cause": "batch", **found._asdict(), "double_s": way.seconds, "step_s": base.seconds},
    )


def _threads(evidence: Evidence, ways: dict[str, Way], base: Way) -> Iterator[Finding]:
    too_many = crowded(evidence)
    way = ways.get("half-threads")
    found = gain(way, base) if way else Gain()
    lost = losses(ways)["contention"] / base.seconds if too_many and "apart" in ways else 0.0
    if max(found.saved, lost) < WORTH or (found.low < 0 and not too_many):
        return
    placement = evidence.spec.placement
    fitting = max(1, known_cores(evidence) // (base.ranks if placement.emulated else base.ranks // placement.hosts))
    threads = fitting if too_many else base.threads // 2
    measured = (
        ""
        if way is None
        else f"half of them save {percent(found.saved)} of a step ({percent(found.low)} to {percent(found.high)}, n = {len(base.rounds)} rounds)"
    )
    crowd = f"{base.ranks} ranks x {base.threads} threads share {known_cores(evidence)} cores" if too_many else ""
    together = f"working at once costs {percent(lost)} of a step" if lost else ""
    yield Finding(
        verdict=f"threads get into each other's way: threads={base.threads} is too many here",
        why="; ".join(text for text in (crowd, measured, together) if text),
        next=f"threads={threads}",
        cost=max(found.saved, lost),
        figures={"cause": "threads", **found._asdict(), "contention": lost, "step_s": base.seconds},
    )


def _none(ways: dict[str, Way], base: Way) -> Finding:
    tried = {"no-data": "no loader", "double": "twice the batch", "half-threads": "half the threads"}
    parts = {name: gain(ways[name], base, 2 if name == "double" else 1).saved for name in tried if name in ways}
    return Finding(
        verdict="neither the loader, nor the batch, nor the threads hold it up",
        why="saved by " + ", ".join(f"{tried[name]} {percent(saved)}" for name, saved in parts.items()),
        figures={"cause": None, **parts},
    )


def _from_run(evidence: Evidence) -> Iterator[Finding]:
    """Without `--measure`: the loader's share by the step clock, and the number of threads."""
    if not evidence.step:
        return
    step, data = evidence.step["total"], evidence.step["data"]
    measure = (
        "" if evidence.spec.options.script else f"; see what it is worth: lockstep explain {evidence.run.id} --measure"
    )
    if crowded(evidence):
        placement = evidence.spec.placement
        yield Finding(
            verdict=f"there are more threads than cores: {placement.ranks} ranks x {placement.threads} threads on {known_cores(evidence)}",
            why="threads without a core of their own take turns; what that costs has not been measured",
            next=f"leave threads out{measure}",
            figures={"cause": "threads"},
        )
    if data > WORTH * step:
        on = augmentations(evidence)
        yield Finding(
            verdict=f"the loader takes {percent(data / step)} of a step",
            why=f"{duration(data)} of {duration(step)} until the batch is there"
            + (f"; on: {', '.join(on)}" if on else ""),
            next=f"{'try it with less of ' + ', '.join(on) if on else 'make the batches in advance'}{measure}",
            cost=data / step,
            figures={"cause": "loader", "data_s": data, "step_s": step},
        )


def augmentations(evidence: Evidence) -> list[str]:
    """The settings that give the loader work."""
    chosen, default = evidence.spec.recipe.augment, Augment()
    on = [f"augment.{key}" for key in chosen.__struct_fields__ if getattr(chosen, key) != getattr(default, key)]
    return on + (["regularize.mixup"] if evidence.spec.recipe.regularize.mixup else [])
