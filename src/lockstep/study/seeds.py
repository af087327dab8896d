"""With how many seeds a recipe is trained: until its accuracy is told apart from what it is compared with, or called the same.

There are three looks, after `repeats`, twice and four times as many seeds. Each has a third of the error, so that looking again does not find
more differences than there are.
"""

from __future__ import annotations

from dataclasses import replace

from lockstep.metrics import metric_of
from lockstep.study import gather
from lockstep.study.folder import StudyFolder
from lockstep.study.gather import Group
from lockstep.study.plan import Planned
from lockstep.study.versus import LOOK_ALPHA, versus_all


def undecided(folder: StudyFolder, planned: Planned, seeds: int) -> set[str]:
    """The first cells of the recipes that are in a comparison of something learned which is not settled after N seeds."""
    groups = {group.name: _first(group, seeds) for group in gather.of_study(folder, planned)}
    learned = [metric for metric in planned.study.metrics if metric_of(metric).learned]
    trained = [name for name, group in groups.items() if group.done]
    if not trained:
        return set()
    base = planned.baseline if planned.baseline in trained else trained[0]
    asked = [(metric, name, base) for metric in learned for name in groups if name != base]
    for claim in (claim for published in planned.study.published for claim in published.claims):
        if metric_of(claim.metric).learned:
            asked.append((claim.metric, claim.more, claim.less))
    found: set[str] = set()
    for metric in {metric for metric, _, _ in asked}:
        pairs = [(a, b) for one, a, b in asked if one == metric and groups[a].done and groups[b].done]
        sides = [(groups[a], groups[b]) for a, b in pairs]
        for pair, one in zip(pairs, versus_all(sides, metric, None, LOOK_ALPHA), strict=True):
            if not one.settled:
                found |= {planned.alike(name)[0].name for name in pair}
    return found


def _first(group: Group, seeds: int) -> Group:
    """With its first trainings alone, as they were at that look."""
    return replace(group, samples=[each for each in group.samples if each.pair[1] < seeds])
