"""One cell against another, in one metric: by the race where both took turns, else pair by pair.

What belongs to the placement (time, memory) is paired by start, what belongs to the recipe (accuracy) by seed. A time to an accuracy is a
number of images, which a training gave, times the time of an image, which the race gave.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from lockstep.metrics import Kind, metric_of
from lockstep.statistics import ALPHA, MARGIN_RATIO, WORDS, Comparison, Spread, Verdict, compare_family, pooled
from lockstep.study.gather import Group
from lockstep.study.observed import images_of, observed
from lockstep.study.plan import LOOKS
from lockstep.study.timing import COUNTED, CellTime
from lockstep.turns.estimate import Clock, Ratio
from lockstep.units import counted

LOOK_ALPHA = ALPHA / len(LOOKS)
"""A study compares accuracies after each look, and stops when they are told apart: each look has its share of the error."""
CLOCKS: dict[str, Clock] = {"cpu_seconds": "cpu", "forward_seconds": "forward", "backward_seconds": "backward"}
# What a race measures at each start, without comparing it itself.
MEASURED_BY_START = ("memory", "memory_of_a_rank", COUNTED)


def versus(group: Group, base: Group, metric: str, target: float | None) -> Comparison:
    """One comparison by itself."""
    return versus_all([(group, base)], metric, target)[0]


def versus_all(
    sides: Sequence[tuple[Group, Group]], metric: str, target: float | None, alpha: float = ALPHA
) -> list[Comparison]:
    """A family of comparisons, pair by pair. Where two cells took turns, the race has compared their times already."""
    figure = metric_of(metric)
    if figure.of_placement:
        alpha = ALPHA  # a race has its own looks
    found: dict[int, Comparison] = {}
    family: dict[tuple[Any, ...], list[int]] = {}
    for index, (group, base) in enumerate(sides):
        if group.time and base.time and not figure.learned and metric not in MEASURED_BY_START:
            found[index] = _in_turns(group, group.time, base, base.time, metric, target)
        elif metric == COUNTED and (exact := _counted(group, base)):
            found[index] = exact
        elif figure.learned and _trainings(group) == _trainings(base) != ():
            none = 1.0 if figure.by_ratio else 0.0
            found[index] = Comparison(len(group.done), none, none, none, "the same", None, "the same trainings")
        else:
            # Cells that share their trainings are one comparison, not several.
            key = (_trainings(group), _trainings(base)) if figure.learned else (index,)
            family.setdefault(key, []).append(index)
    pairs = [_pairs(*sides[indices[0]], metric, target) for indices in family.values()]
    spread = _seeds(sides, metric) if figure.learned else None
    for indices, pair, comparison in zip(
        family.values(), pairs, compare_family(pairs, figure.kind, alpha, spread), strict=True
    ):
        if (
            figure.kind == "measure" and min([*pair[0], *pair[1]], default=1.0) <= 0
        ):  # a difference, and no ratio to be shown
            comparison = dataclasses.replace(comparison, effect=None, low=None, high=None)
        found |= dict.fromkeys(indices, comparison)
    return [found[index] for index in range(len(sides))]


def _counted(group: Group, base: Group) -> Comparison | None:
    """Bytes that are the same in every start were counted, not measured: there is nothing to be unsure of."""
    ours, theirs = ({*observed(side, COUNTED, None).values()} for side in (group, base))
    if len(ours) != 1 or len(theirs) != 1:
        return None
    ratio, kind = ours.pop() / theirs.pop(), metric_of(COUNTED).kind
    return Comparison(1, ratio, ratio, ratio, _by_interval(ratio, ratio, kind), None, "counted")


def _seeds(sides: Sequence[tuple[Group, Group]], metric: str) -> Spread | None:
    """What another seed changes, by all recipes of these comparisons: those that share their trainings are one."""
    recipes = {_trainings(group): group for pair in sides for group in pair}
    cells = [observed(group, metric, None) for group in recipes.values()]
    if metric_of(metric).kind == "accuracy":
        return pooled(cells)
    # Compared by ratio, where values are above zero.
    if not all(value > 0 for cell in cells for value in cell.values()):
        return None
    return pooled([{seed: math.log(value) for seed, value in cell.items()} for cell in cells])


def _trainings(group: Group) -> tuple[str, ...]:
    return tuple(each.run.id for each in group.done)


def _pairs(group: Group, base: Group, metric: str, target: float | None) -> tuple[list[float], list[float]]:
    turned = bool(group.time and base.time)
    ours, theirs = observed(group, metric, target, turned), observed(base, metric, target, turned)
    both = [key for key in ours if key in theirs]
    return [ours[key] for key in both], [theirs[key] for key in both]


def _in_turns(
    group: Group, ours: CellTime, base: Group, theirs: CellTime, metric: str, target: float | None
) -> Comparison:
    """A time: the race's ratio for an image, times how many images each side trains, and for cost how many cores it holds."""
    kind = metric_of(metric).kind
    ratio = ours.race.ratio(ours.cell.name, theirs.cell.name, CLOCKS.get(metric, "wall"))
    if metric == "images_per_second":
        return _raced(ratio, 1.0, kind)
    cores = group.cores / base.cores if metric in ("core_seconds", "cost_to_target") else 1.0
    work, others = (images_of(side, metric, target) for side in (group, base))
    both = [key for key in work if key in others]
    if not both:
        if metric_of(metric).of_placement and ours.length_known and theirs.length_known:
            return _raced(ratio, cores * ours.whole_images / theirs.whole_images, kind)
        return Comparison(0, None, None, None, "too few", None, "no pair has both")
    shares = [work[key] / others[key] for key in both if math.isfinite(work[key]) and math.isfinite(others[key])]
    # One training that stopped early says nothing about when others would.
    sure = len(both) > 1 or not (ours.stops_early or theirs.stops_early)
    if sure and len(shares) == len(both) and max(shares) - min(shares) < 1e-9:
        return _raced(ratio, cores * shares[0], kind)
    # How much is trained differs from seed to seed: what that leaves open and what the race leaves open add up.
    trained = compare_family([([cores * work[key] for key in both], [others[key] for key in both])], kind)[0]
    return _together(trained, ratio, kind)


def _together(trained: Comparison, ratio: Ratio, kind: Kind) -> Comparison:
    """The product of two ratios that were measured apart; on the scale of logs their intervals add up as squares do."""
    if trained.effect is None or ratio.effect is None:
        return trained
    effect = trained.effect * ratio.effect
    bounds = trained.low, trained.high, ratio.low, ratio.high
    if None in bounds or not all(bound and bound > 0 for bound in bounds):
        return dataclasses.replace(trained, effect=effect, low=None, high=None, verdict="too few", more=None)
    parts = [
        math.log(high / low) / 2 for low, high in ((trained.low, trained.high), (ratio.low, ratio.high)) if low and high
    ]
    half = math.hypot(*parts)
    low, high = effect * math.exp(-half), effect * math.exp(half)
    return Comparison(trained.n, effect, low, high, _by_interval(low, high, kind), None, "trainings and turns")


def _by_interval(low: float, high: float, kind: Kind) -> Verdict:
    larger, smaller = WORDS[kind]
    if low >= 1 / (1 + MARGIN_RATIO) and high <= 1 + MARGIN_RATIO:
        return "the same"
    return larger if low > 1 else smaller if high < 1 else "not significant"


def _raced(ratio: Ratio, work: float, kind: Kind) -> Comparison:
    """A ratio of a race as a comparison. `work`: what the contender does, as a multiple of what the other one does."""
    if ratio.effect is None:
        return Comparison(0, None, None, None, "too few", None, "turns")
    effect = 1 / ratio.effect if kind == "rate" else work * ratio.effect
    if ratio.low is None or ratio.high is None:
        return Comparison(ratio.n, effect, None, None, "too few", None, "turns")
    low, high = (1 / ratio.high, 1 / ratio.low) if kind == "rate" else (work * ratio.low, work * ratio.high)
    larger, smaller = WORDS[kind]
    slow, fast = (smaller, larger) if kind == "rate" else (larger, smaller)
    words: dict[str, Verdict] = {"slower": slow, "faster": fast, "the same": "the same"}
    verdict = words.get(ratio.verdict, "not significant") if work == 1 else _by_interval(low, high, kind)
    return Comparison(ratio.n, effect, low, high, verdict, None, "turns", ratio.p, ratio.level)


def verdict_text(found: Comparison) -> str:
    """The verdict in words, with what would settle it."""
    if found.verdict == "too few":
        if "turns" in found.how and found.n:
            return f"{counted(found.n, 'start')}: too few for an interval: give the race more time with race_minutes"
        return "one pair: repeat it" if found.n == 1 else "too few pairs"
    if found.verdict != "not significant":
        return found.verdict
    if "turns" in found.how:
        return "not settled in the time that the race had: give it more with race_minutes"
    if found.more is None:
        return f"not significant ({counted(found.n, 'pair')} do not say how many more would settle it)"
    few, most = found.more
    if few == most:
        return f"not significant (at most {counted(most, 'more repeat')} would settle it)"
    return f"not significant ({counted(few, 'more repeat')} would settle it if it is as large as it looks, {most} whatever it is)"
