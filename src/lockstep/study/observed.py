"""The values of a metric in one cell, by what pairs them with those of another: starts of the race, or trainings."""

from __future__ import annotations

import math
import statistics
from typing import Any

from lockstep.metrics import epochs_to, metric_of, value
from lockstep.study.gather import Group
from lockstep.study.timing import CellTime


def observed(group: Group, metric: str, target: float | None, turned: bool = True) -> dict[Any, float]:
    """The values of a metric by what pairs them: by start where it was measured in turns, else by training.

    The same seed gives the same accuracy again, so repeating it adds no evidence: there is one value for each seed.
    """
    if turned and group.time:
        if metric_of(metric).of_placement:
            return dict(group.time.values(metric))
        if not metric_of(metric).learned:
            return _to_target(group, group.time, metric, target)
    if metric_of(metric).learned:
        by_seed: dict[int, list[float]] = {}
        for each in group.done:
            if (found := value(each.run, metric, target)) is not None:
                by_seed.setdefault(each.seed, []).append(found)
        return {seed: statistics.fmean(values) for seed, values in by_seed.items()}
    own = {each.pair: value(each.run, metric, target) for each in group.done if each.own}
    return {pair: found for pair, found in own.items() if found is not None}


def _to_target(group: Group, time: CellTime, metric: str, target: float | None) -> dict[Any, float]:
    """By training: the images that it needed, times what an image takes in turns. Infinite where it was tested and never got there."""
    factor = time.cost * (1 if metric == "seconds_to_target" else group.cores)
    return {pair: factor * images for pair, images in images_of(group, metric, target).items()}


def images_of(group: Group, metric: str, target: float | None) -> dict[Any, float]:
    """How many images each training took: in all, or to the target accuracy."""
    if metric_of(metric).of_placement:
        found = {each.pair: each.summary.get("train_images") for each in group.done}
        return {pair: float(images) for pair, images in found.items() if images}
    needed: dict[Any, float] = {}
    for each in group.done:
        epochs = each.run.epochs()
        count = epochs_to(epochs, target)
        if count is not None:
            whole = group.spec.plan.train_samples
            trained = [float(epoch.get("samples") or whole) for epoch in epochs]
            needed[each.pair] = math.inf if math.isinf(count) else sum(trained[: int(count)])
    return needed
