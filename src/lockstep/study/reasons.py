"""What is known about why two cells differ: for a time the phase of the step, for an accuracy what differs in the recipe."""

from __future__ import annotations

from statistics import fmean
from typing import NamedTuple

from lockstep.metrics import metric_of
from lockstep.placement import changes_mathematics
from lockstep.settings import dotted
from lockstep.study.fairness import what_differs
from lockstep.study.gather import Group
from lockstep.turns.where import SAME, Phases, beyond_share, by_cores, phases, told
from lockstep.units import counted

# Epochs that differ by less than a hundredth are no reason.
SAME_WORK = 0.01
BATCH = ("batch_per_rank", "global_batch")
UNKNOWN = "not known: other work had the cores, which slows some more than others"


def known(more: Group, less: Group, metric: str, starved: bool) -> str:
    """In one sentence; empty where nothing is known that says it."""
    if metric_of(metric).learned:
        return _recipes(more, less)
    if metric != "seconds" or not (more.time and less.time):
        return ""
    work, others = more.time.whole_images, less.time.whole_images
    if abs(work / others - 1) > SAME_WORK:
        return f"'{more.name}' trains {work:,.0f} images, '{less.name}' {others:,.0f}"
    fast, slow = (more, less) if more.time.cost < less.time.cost else (less, more)
    return of_speed(fast, slow, True, starved)


def _recipes(more: Group, less: Group) -> str:
    """What they learn by."""
    ours, theirs = (dotted(group.spec.recipe) for group in (more, less))
    keys = [key for key in what_differs(more, less) if key not in BATCH]
    found = [f"{key} {ours.get(key)} against {theirs.get(key)}" for key in keys]
    sizes = more.spec.plan.global_batch, less.spec.plan.global_batch
    if sizes[0] != sizes[1]:
        found.insert(0, f"global batch {sizes[0]} against {sizes[1]}")
    return f"'{more.name}' against '{less.name}': {', '.join(found)}" if found else ""


class Side(NamedTuple):
    """One of two that are compared."""

    cores: int
    phases: Phases
    """Seconds of each for a sample, and of the whole as `total`; empty where they are not known."""


def of_difference(ours: Side, theirs: Side, faster: bool, alike: bool, there: int | None, starved: bool) -> str:
    """Why one is faster or slower than the other: the one rule for races, studies and runs. Empty where nothing is known that says it.

    With more or fewer cores every phase differs; that counts where the recipe is `alike`. `there`: the cores of the machine. Steps may say
    otherwise than whole trainings: no phase is the reason then.
    """
    more, fewer = max(ours.cores, theirs.cores), min(ours.cores, theirs.cores)
    if there and more > there:
        return f"{more} threads take turns on {counted(there, 'core')}"
    if starved:
        return UNKNOWN
    if alike and more != fewer and faster == (ours.cores > theirs.cores):
        return by_cores(ours.cores, theirs.cores, ours.phases)
    if not ours.phases or not theirs.phases:
        return ""
    ratio = ours.phases["total"] / theirs.phases["total"]
    if abs(ratio - 1) > SAME and (ratio < 1) != faster:
        return ""
    if alike and more != fewer:
        slow, fast = (theirs, ours) if faster else (ours, theirs)
        return beyond_share(more, fewer, slow.phases, fast.phases)
    return told(ours.phases, theirs.phases)


def of_speed(cell: Group, base: Group, faster: bool, starved: bool) -> str:
    """By the race, else by the steps of one run of each."""
    if cell.time and base.time:
        both = phases(cell.time.cell.name, base.time.cell.name, cell.time.race.windows) or ({}, {})
    else:
        both = _phases(cell), _phases(base)
    alike = not {*what_differs(cell, base)} - {*BATCH}
    sides = Side(cell.cores, both[0]), Side(base.cores, both[1])
    return of_difference(*sides, faster, alike, cores_of(cell), starved)


def cores_of(cell: Group) -> int | None:
    """Of the machine that it was timed on."""
    if cell.time:
        return int(cell.time.race.state.machine.get("cores") or 0) or None
    return next((int(n) for each in cell.done if (n := each.run.environment().get("cores_machine"))), None)


def of_learning(cell: Group, base: Group) -> str:
    """What of the recipe differs from the baseline's, as far as it bears on what is learned."""
    ours, theirs = cell.spec, base.spec
    found = []
    if ours.plan.global_batch != theirs.plan.global_batch:
        kept = " at the same learning rate" if ours.plan.lr == theirs.plan.lr and ours.plan.lr else ""
        found.append(
            f"global batch {ours.plan.global_batch:,} instead of {theirs.plan.global_batch:,}, so "
            f"{ours.plan.total_steps:,} updates instead of {theirs.plan.total_steps:,}{kept}"
        )
    keys, others = dotted(ours.recipe), dotted(theirs.recipe)
    unsaid = [key for key in what_differs(cell, base) if key not in BATCH and f"{key}=" not in cell.name]
    found += [f"{key}={keys.get(key)} instead of {others.get(key)}" for key in unsaid]
    changed = changes_mathematics(ours.placement, ours.recipe)
    if changed and not changes_mathematics(theirs.placement, theirs.recipe):
        found.append(changed)
    return "; ".join(found)


def _phases(group: Group) -> Phases:
    """Seconds of each phase for a sample, by the race, else from the records of its first run; empty where they are not known."""
    if group.time and (raced := group.time.phases()):
        samples = group.time.plan.global_batch
        return {**{name: seconds / samples for name, seconds in raced.items()}, "total": group.time.cost}
    own = next((each.run for each in group.done if each.own), None)
    ranks, samples = own.split() if own else [], group.spec.plan.global_batch
    return {name: fmean(parts[name] for parts in ranks) / samples for name in ranks[0]} if ranks and samples else {}
