"""The usual suspects in a training that Lockstep only looks at (docs/attach.md): what its hooks have seen, with the time that it is about.

Three kinds. What changes what is learned comes first, and is here. So does what makes other parts of a step longer (inflating.py). The rest is a share
of a step that has a name (phases.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lockstep.explain import inflating, phases
from lockstep.explain.evidence import Evidence
from lockstep.explain.finding import Finding
from lockstep.explain.inflating import TOO_OFTEN
from lockstep.units import counted, percent


def answer(evidence: Evidence) -> Iterator[Finding]:
    if evidence.spec.options.attached is None or not evidence.step:
        return
    seen = evidence.run.attached()
    yield from _learning(evidence, seen)
    yield from inflating.modes(evidence, seen)
    yield from inflating.exchange(evidence, seen)
    yield from inflating.evaluation(evidence, seen)
    yield from inflating.workers(evidence, seen)
    yield from phases.update(evidence, seen)
    yield from phases.beside(evidence, seen)
    yield from phases.neighbour(evidence, seen)


def _learning(evidence: Evidence, seen: dict[str, Any]) -> Iterator[Finding]:
    """What changes what is learned, or what is measured of it."""
    loader = seen.get("loader") or {}
    scheduled, updates = inflating.pair(seen, "scheduled")
    often = scheduled / updates if updates else 0.0
    if often > TOO_OFTEN:
        yield Finding(
            verdict=f"the learning-rate schedule goes on {often:.3g} times per update",
            why=f"scheduler.step() was called {scheduled:,} times in {counted(updates, 'update')} of its optimizer: it is over after {percent(1 / often)} of them",
            next="call it once per optimizer.step(); Accelerate calls it once for each process, unless step_scheduler_with_optimizer=False",
            cause="schedule",
            wrong=True,
            figures={"cause": "schedule", "scheduled": scheduled, "updates": updates},
        )
    if loader.get("same_order"):
        again, passes = int(loader["same_order"]), int(loader.get("epochs") or loader["passes"])
        yield Finding(
            verdict="every epoch has the same order of samples: set_epoch is missing",
            why=f"{again} of {passes - 1} epochs after the first had the order of the one before: the DistributedSampler shuffles by its epoch, "
            "which nobody has set",
            next="sampler.set_epoch(epoch) before each epoch",
            cause="order",
            wrong=True,
            figures={"cause": "order", "again": again, "passes": passes},
        )
    told = set()
    for one in [loader, *(seen.get("evaluated_by") or [])]:
        padded, samples = (int(one.get(key) or 0) for key in ("padded", "samples"))
        evaluated = bool(one.get("evaluated"))
        if padded and (padded, samples, evaluated) not in told:  # the loader that trains may evaluate too
            told.add((padded, samples, evaluated))
            what = "the evaluation counts" if evaluated else "an epoch has"
            yield Finding(
                verdict=f"{what} {counted(padded, 'sample')} twice: its sampler pads",
                why=f"{samples:,} samples do not divide by {one['shares']} ranks, so a DistributedSampler takes {samples + padded:,}",
                next="evaluate in one process, or take the samples that were added out of the result"
                if evaluated
                else "drop_last=True, if it matters",
                cause="padding",
                wrong=evaluated,
                figures={"cause": "padding", "padded": padded, "samples": samples, "evaluated": evaluated},
            )
