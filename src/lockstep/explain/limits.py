"""Is it the loader, the batch, the threads, the buckets? Each is answered by a counterfactual: the same step without it, measured in turns."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import NamedTuple

from lockstep.explain import blocks, phases
from lockstep.explain.evidence import Evidence
from lockstep.explain.finding import Finding
from lockstep.explain.speedup import crowded, known_cores
from lockstep.placement import DEFAULT_BUCKET_MB
from lockstep.recipe import Augment
from lockstep.statistics import MARGIN_RATIO, median_interval
from lockstep.units import counted, duration, percent
from lockstep.ways import Way

# A smaller saving is not worth reporting; nor is one that is not surely more than MARGIN_RATIO.
WORTH = 0.05


def answer(evidence: Evidence) -> Iterator[Finding]:
    ways = evidence.ways
    base = ways.get("together") or ways.get("plain")
    if base is None:
        yield from _from_run(evidence)
        return
    found = [
        *_threads(evidence, ways, base),
        *_buckets(evidence, ways, base),
        *_loader(evidence, ways, base),
        *_batch(evidence, ways, base),
    ]
    yield from found or [_none(ways, base)]


class Gain(NamedTuple):
    """The share of the base's time that is saved, with its interval over rounds."""

    saved: float
    low: float
    high: float

    @property
    def worth(self) -> bool:
        return self.saved >= WORTH and self.low > MARGIN_RATIO

    @property
    def ends(self) -> tuple[float, float] | None:
        return (self.low, self.high) if math.isfinite(self.high) else None

    @property
    def text(self) -> str:
        return f"{percent(self.saved)} ({percent(self.low)} to {percent(self.high)})"


def gain(way: Way, base: Way, samples: float = 1.0) -> Gain:
    """`samples`: the work of `way` as a multiple of the base's."""
    saved = [1 - a / samples / b for a, b in zip(way.by_round, base.by_round, strict=True)]
    between = median_interval(saved)
    # One round says nothing about the spread, so it settles nothing.
    low, high = (between.low, between.high) if between else (-math.inf, math.inf)
    return Gain(statistics.median(saved), low, high)


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
        why=f"{found.text} of a step, n = {counted(len(base.rounds), 'round')} with one batch used again and again; it is {blame}",
        next=f"try it with less of {', '.join(on)}" if on else "use a smaller data type or image for the data set",
        cost=found.saved,
        interval=found.ends,
        cause="loader",
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
        why=f"{duration(way.seconds)} for {way.samples} samples against {duration(base.seconds)} for {base.samples}: {found.text} saved, n = {counted(len(base.rounds), 'round')}",
        next=more,
        cost=found.saved,
        interval=found.ends,
        cause="batch",
        figures={"cause": "batch", **found._asdict(), "double_s": way.seconds, "step_s": base.seconds},
    )


def _threads(evidence: Evidence, ways: dict[str, Way], base: Way) -> Iterator[Finding]:
    """Threads without a core of their own take turns, which makes every call long: whatever saves calls then seems to help."""
    way, too_many = ways.get("fewer-threads"), crowded(evidence)
    found = gain(way, base) if way else None
    worth = found is not None and found.worth
    harmless = found is not None and found.high < WORTH
    if not worth and (harmless or not too_many):
        return
    placement, cores = evidence.spec.placement, known_cores(evidence)
    threads = placement.threads or 1
    local = base.ranks if placement.emulated else max(1, base.ranks // placement.hosts)
    measured = (
        f"threads={way.threads} saves {found.text} of a step, n = {counted(len(base.rounds), 'round')}"
        if way and found
        else ""
    )
    crowd = (
        f"{counted(local, 'rank')} x {counted(threads, 'thread')} share {counted(cores or 0, 'core')}"
        if too_many
        else ""
    )
    if worth:
        verdict = f"threads get into each other's way: threads={threads} is too many here"
    elif threads > 1:
        verdict = f"there are more threads than cores, and whether fewer would be faster is not settled: {crowd}"
    else:
        verdict = f"there are more ranks than cores, and they take turns: {local} ranks on {cores}"
    fitting = f"threads={max(1, cores // local) if too_many else threads // 2}"
    yield Finding(
        verdict=verdict,
        why="; ".join(text for text in (crowd, measured or "what fewer ranks would save was not measured") if text),
        next=fitting if threads > 1 else f"ranks={max(1, base.ranks * cores // local)}",
        cost=found.saved if found and worth else 0.0,
        interval=found.ends if found and worth else None,
        cause="threads" if worth else "",
        inflates=too_many,
        figures={"cause": "threads", **(found._asdict() if found else {}), "step_s": base.seconds},
    )


def _buckets(evidence: Evidence, ways: dict[str, Way], base: Way) -> Iterator[Finding]:
    """Every bucket is a message, and a message has a price of its own; the exchange that they make longer is shown by other findings too."""
    way = ways.get("large-buckets")
    found = gain(way, base) if way else None
    if way is None or found is None or not found.worth:
        return
    size = evidence.spec.placement.ddp.bucket_mb
    yield Finding(
        verdict=f"the buckets are small: with ddp.bucket_mb={DEFAULT_BUCKET_MB:g} instead of {size:g}, a step would take "
        f"{duration(way.seconds)} instead of {duration(base.seconds)}",
        why=f"{found.text} of a step, n = {counted(len(base.rounds), 'round')}: every bucket is a message of its own",
        next=f"ddp.bucket_mb={DEFAULT_BUCKET_MB:g}, which is the default",
        cost=found.saved,
        interval=found.ends,
        cause="buckets",
        inflates=True,
        figures={"cause": "buckets", **found._asdict(), "without_s": way.seconds, "step_s": base.seconds},
    )


def _none(ways: dict[str, Way], base: Way) -> Finding:
    tried = {
        "no-data": "no loader",
        "double": "twice the batch",
        "fewer-threads": "fewer threads",
        "large-buckets": "large buckets",
    }
    parts = {name: gain(ways[name], base, 2 if name == "double" else 1) for name in tried if name in ways}
    return Finding(
        verdict="neither the loader, nor the batch, nor the threads, nor the buckets hold it up",
        why=f"saved by {', '.join(f'{tried[name]} {found.text}' for name, found in parts.items())}, n = {counted(len(base.rounds), 'round')}",
        figures={
            "cause": None,
            **{name: found.saved for name, found in parts.items()},
            "intervals": {name: [found.low, found.high] for name, found in parts.items()},
        },
    )


def _from_run(evidence: Evidence) -> Iterator[Finding]:
    """Without `--measure`: the loader's share by the step clock, and the number of threads."""
    if not evidence.step:
        return
    step = evidence.step["total"]
    # Of the rank that has least of it: what one rank has more than the others is for "straggler" to tell.
    data, low, high = blocks.mean(
        min((rows["data_ns"] / 1e9 for rows in evidence.ranks), key=lambda ns: float(ns.mean()))
    )
    surely = low > WORTH * step  # on a busy machine one in twenty comes and goes
    foreign = evidence.spec.options.attached is not None
    measure = (
        ""
        if evidence.spec.options.own_loop
        else f"; see what it is worth: lockstep explain {evidence.run.id} --measure"
    )
    if crowded(evidence):
        placement = evidence.spec.placement
        yield Finding(
            verdict=f"there are more threads than cores: {counted(placement.ranks, 'rank')} x {counted(placement.threads or 1, 'thread')} on {known_cores(evidence)}",
            why="threads without a core of their own take turns; what that costs has not been measured",
            next="torch.set_num_threads, or OMP_NUM_THREADS: cores / ranks"
            if foreign
            else f"leave threads out{measure}",
            cause="threads" if foreign else "",
            inflates=foreign,
            figures={"cause": "threads"},
        )
    if data > WORTH * step:
        on = augmentations(evidence)
        seen, advice = phases.loader(evidence) or ("", "make the batches in advance")
        yield Finding(
            verdict=f"the loader takes {percent(data / step)} of a step",
            why=f"{duration(data)} of {duration(step)} until the batch is there{seen}"
            + (f"; on: {', '.join(on)}" if on else ""),
            next=f"{'try it with less of ' + ', '.join(on) if on else advice}{measure}",
            cost=data / step,
            interval=(low / step, high / step) if surely else None,
            cause="loader" if surely else "",
            figures={"cause": "loader", "data_s": data, "step_s": step},
        )


def augmentations(evidence: Evidence) -> list[str]:
    """The settings that give the loader work."""
    chosen, default = evidence.spec.recipe.augment, Augment()
    on = [f"augment.{key}" for key in chosen.__struct_fields__ if getattr(chosen, key) != getattr(default, key)]
    return on + (["regularize.mixup"] if evidence.spec.recipe.regularize.mixup else [])
