"""What each factor of a factorial study does, and whether factors change each other's effect.

A factor's effect is the mean over all levels of the other factors, so every cell tells about every factor. It is worked out pair by pair
(by start in turns, by seed for accuracies), and the interval is Student's t over the pairs. An interaction of two factors is how much the
effect of one changes with the level of the other. All of a metric's effects are one family (Bonferroni).
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any

from lockstep.metrics import metric_of
from lockstep.statistics import ALPHA, MARGIN_DIFFERENCE, MARGIN_RATIO, WORDS, t_quantile
from lockstep.study.definition import Study
from lockstep.study.gather import Group
from lockstep.study.observed import observed
from lockstep.study.plan import LOOKS
from lockstep.study.timing import COUNTED
from lockstep.turns.estimate import LEVEL

Levels = tuple[str, ...]


def effects(study: Study, groups: Sequence[Group], target: float | None) -> list[dict[str, Any]]:
    """Empty unless two factors or more were crossed and every cell of the grid was measured."""
    if len(study.factors) < 2:
        return []
    grid = {", ".join(levels): levels for levels in itertools.product(*study.factors.values())}
    cells = {grid[group.name]: group for group in groups if group.name in grid and group.measured}
    if len(cells) < len(grid):
        return []
    found = []
    for metric in study.metrics:
        found += _of_metric(study, cells, metric, target)
    return found


def _of_metric(study: Study, cells: dict[Levels, Group], metric: str, target: float | None) -> list[dict[str, Any]]:
    scaled = metric_of(metric).by_ratio
    values = {levels: observed(group, metric, target) for levels, group in cells.items()}
    shared = sorted(set.intersection(*(set(each) for each in values.values())), key=str)
    usable = [
        key
        for key in shared
        if all(math.isfinite(each[key]) and (each[key] > 0 or not scaled) for each in values.values())
    ]
    if len(usable) < 2:
        return []
    rows = [{levels: math.log(each[key]) if scaled else each[key] for levels, each in values.items()} for key in usable]
    names = list(study.factors)
    contrasts: list[tuple[str, str, list[float]]] = []
    for place, name in enumerate(names):
        first, *others = study.factors[name]
        for level in others:
            shifts = [_mean(row, {place: level}) - _mean(row, {place: first}) for row in rows]
            contrasts.append((name, f"{level} against {first}", shifts))
    for (a, one), (b, other) in itertools.combinations(enumerate(names), 2):
        base_a, *levels_a = study.factors[one]
        base_b, *levels_b = study.factors[other]
        for x, y in itertools.product(levels_a, levels_b):
            shifts = [
                _mean(row, {a: x, b: y})
                - _mean(row, {a: base_a, b: y})
                - _mean(row, {a: x, b: base_b})
                + _mean(row, {a: base_a, b: base_b})
                for row in rows
            ]
            contrasts.append((f"{one} and {other}", f"{x} with {y}", shifts))
    error = (
        LEVEL if metric_of(metric).of_placement and all(group.time for group in cells.values()) else ALPHA / len(LOOKS)
    )
    return [_effect(metric, *contrast, alpha=error / len(contrasts)) for contrast in contrasts]


def _mean(row: dict[Levels, float], fixed: dict[int, str]) -> float:
    return statistics.fmean(
        value for levels, value in row.items() if all(levels[place] == level for place, level in fixed.items())
    )


def _effect(metric: str, factor: str, level: str, shifts: Sequence[float], alpha: float) -> dict[str, Any]:
    figure, n = metric_of(metric), len(shifts)
    back = math.exp if figure.by_ratio else float
    middle, spread = statistics.fmean(shifts), statistics.stdev(shifts)
    half = t_quantile(alpha, n - 1) * spread / math.sqrt(n)
    larger, smaller = WORDS[figure.kind]
    margin = math.log1p(MARGIN_RATIO) if figure.by_ratio else MARGIN_DIFFERENCE
    verdict = larger if middle - half > 0 else smaller if middle + half < 0 else "not settled"
    if spread == 0 and middle != 0 and metric != COUNTED:
        verdict = "not settled"  # equal steps say nothing about their spread
    elif abs(middle) + half <= margin:
        verdict = "the same"
    low, high = back(middle - half), back(middle + half)
    return {
        "metric": metric,
        "factor": factor,
        "level": level,
        "n": n,
        "effect": back(middle),
        "low": low,
        "high": high,
        "verdict": verdict,
        "text": figure.effect(back(middle), low, high, n),
    }
