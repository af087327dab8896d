"""Which backend, how many ranks, which batch? The least time to the accuracy asked for, of all that was run on this task."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from lockstep.explain.evidence import Evidence
from lockstep.explain.finding import Finding
from lockstep.metrics import common_target, value
from lockstep.study.gather import Group, of_runs
from lockstep.study.versus import versus_all
from lockstep.units import percent

METRIC = "seconds_to_target"


def answer(evidence: Evidence) -> Iterator[Finding]:
    recipe = evidence.spec.recipe
    task = (recipe.model, recipe.data, recipe.train_limit, recipe.test_limit)
    runs = [
        run
        for run in (evidence.run, *evidence.peers)
        if (spec := run.spec().recipe) and (spec.model, spec.data, spec.train_limit, spec.test_limit) == task
    ]
    groups = [group for group in of_runs(runs) if group.done]
    for group in groups:
        group.name = evidence.cells.get(group.done[0].run.id, group.name)
    if len(groups) < 2:
        yield _alone(evidence)
        return
    target = evidence.target or common_target([each.run for group in groups for each in group.done])
    timed = {group.name: _median_time(group, target) for group in groups}
    reached = [group for group in groups if timed[group.name] is not None]
    mine = next((g for g in groups if any(s.run.id == evidence.run.id for s in g.samples)), None)
    if target is None or not reached or mine is None:
        return
    best = min(reached, key=lambda group: timed[group.name] or 0.0)
    figures = {"target": target, "seconds": timed, "best": best.name, "mine": mine.name}
    missed = [group.name for group in groups if timed[group.name] is None]
    others = f"; never reached by {len(missed)} of them" if missed else ""
    if best is mine:
        yield Finding(
            verdict=f"nothing that was run here reaches {target:.1%} sooner than this",
            why=f"{timed[best.name]:.3g} s of training, the least of {len(groups)} settings{others}",
            figures=figures,
        )
        return
    # The best setting was chosen by looking at all of them, so all comparisons are one family.
    others_than_mine = [group for group in groups if group is not mine]
    compared = versus_all([(group, mine) for group in others_than_mine], METRIC, target)
    found = compared[others_than_mine.index(best)]
    time = timed[mine.name]
    saved = None if time is None else 1 - (timed[best.name] or 0.0) / time
    gain = "this run never reached it" if saved is None else f"{percent(saved)} less than this run's {time:.3g} s"
    sure = "" if time is None else f" ({found.verdict}, n = {found.n} pairs)"
    yield Finding(
        verdict=f"for {target:.1%}, choose {best.name}: {timed[best.name]:.3g} s, {gain}{sure}",
        why=f"the least time to that accuracy of {len(groups)} settings of this task that were run{others}",
        next=_how(best, evidence)
        if found.settled or time is None
        else "repeat both: lockstep study run FILE with these as cells",
        cost=max(0.0, saved or 0.0) if found.settled else 0.0,
        figures={**figures, "saved": saved, "verdict": found.verdict, "pairs": found.n},
    )


def _how(best: Group, evidence: Evidence) -> str:
    """What to type: a cell's settings are in its study; another setting is named by its keys."""
    in_study = best.done[0].run.id in evidence.cells
    return (
        f"the settings of this cell: lockstep show {best.done[0].run.id}" if in_study else best.name.replace(", ", " ")
    )


def _median_time(group: Group, target: float | None) -> float | None:
    """The median time to the target; None if a run of the group did not reach it."""
    values = [value(each.run, METRIC, target) for each in group.done]
    known = [each for each in values if each is not None and math.isfinite(each)]
    return statistics.median(known) if known and len(known) == len(values) else None


def _alone(evidence: Evidence) -> Finding:
    return Finding(
        verdict="there is nothing to choose from: only this setting was run",
        why="no other run of this model and data is in this folder of runs",
        next="lockstep study run backends, scaling or batch-size (--quick takes minutes)",
    )
