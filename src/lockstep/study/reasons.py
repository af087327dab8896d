"""What is known about why two cells differ: for a time the phase of the step, for an accuracy what differs in the recipe."""

from __future__ import annotations

from lockstep.metrics import metric_of
from lockstep.settings import dotted
from lockstep.study.fairness import what_differs
from lockstep.study.gather import Group
from lockstep.turns.where import where

# Epochs that differ by less than a hundredth are no reason.
SAME_WORK = 0.01
BATCH = ("batch_per_rank", "global_batch")


def known(more: Group, less: Group, metric: str) -> str:
    """In one sentence; empty where nothing is known that says it."""
    if metric_of(metric).learned:
        return _recipes(more, less)
    if metric != "seconds" or not (more.time and less.time):
        return ""
    work, others = more.time.whole_images, less.time.whole_images
    if abs(work / others - 1) > SAME_WORK:
        return f"'{more.name}' trains {work:,.0f} images, '{less.name}' {others:,.0f}"
    fast, slow = sorted((more.time, less.time), key=lambda time: time.cost)
    return where(fast.cell.name, slow.cell.name, fast.race.windows)


def _recipes(more: Group, less: Group) -> str:
    """What they learn by."""
    ours, theirs = (dotted(group.spec.recipe) for group in (more, less))
    keys = [key for key in what_differs(more, less) if key not in BATCH]
    found = [f"{key} {ours.get(key)} against {theirs.get(key)}" for key in keys]
    sizes = more.spec.plan.global_batch, less.spec.plan.global_batch
    if sizes[0] != sizes[1]:
        found.insert(0, f"global batch {sizes[0]} against {sizes[1]}")
    return f"'{more.name}' against '{less.name}': {', '.join(found)}" if found else ""
