"""Runs that compute the same as one that is explained: in one process, or with another seed. How their accuracies compare."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Literal, NamedTuple

from lockstep.explain.evidence import Evidence
from lockstep.measure.view import RunView
from lockstep.metrics import value
from lockstep.placement import changes_mathematics
from lockstep.recipe import global_terms
from lockstep.run import Spec
from lockstep.settings import dotted
from lockstep.statistics import ALPHA, MARGIN_DIFFERENCE, compare, t_quantile
from lockstep.units import counted, points

# How the batch and the learning rate are stated, and the seed: not what is computed. The rate itself counts.
FREE = ("seed", "batch_per_rank", "lr_rule", "lr_batch")
# With as many seeds on both sides, pairs of one seed say more than a run and the spread of seeds.
FEWEST_PAIRS = 3
# Fewer degrees of freedom say nothing about the spread of seeds.
FEWEST_DEGREES = 2


class Twin(NamedTuple):
    """The accuracy of a run less that of one process with the same recipe, with its 95 % interval."""

    difference: float
    low: float
    high: float
    verdict: Literal["differs", "the same", "open"]
    runs: int
    """In one process."""
    text: str


def compared(evidence: Evidence, accuracy: float) -> Twin | None:
    """The comparison with one process; None where there is no such run."""
    alone = [run for run in evidence.peers if run.spec().plan.ranks == 1 and same_recipe(run.spec(), evidence.spec)]
    theirs = _by_seed(alone)
    if not theirs:
        return None
    ours = _by_seed([evidence.run, *(run for run in evidence.peers if _alike(run.spec(), evidence.spec))])
    seeds = [seed for seed in ours if seed in theirs]
    if len(seeds) >= FEWEST_PAIRS:
        found = compare([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds], "accuracy")
        if found.effect is not None and found.low is not None and found.high is not None:
            how = f"n = {counted(len(seeds), 'pair')} of one seed"
            return _twin(found.effect, found.low, found.high, len(alone), how)
    own = theirs.get(evidence.spec.recipe.seed)
    others = [own] if own is not None else list(theirs.values())
    half, how = _noise(accuracy, [ours, theirs], evidence.spec.plan.test_samples)
    half *= math.sqrt(1 + 1 / len(others))
    difference = accuracy - statistics.fmean(others)
    return _twin(difference, difference - half, difference + half, len(others), how)


def _twin(difference: float, low: float, high: float, runs: int, how: str) -> Twin:
    verdict: Literal["differs", "the same", "open"] = "open"
    if max(-low, high) <= MARGIN_DIFFERENCE:
        verdict = "the same"
    elif low > 0 or high < 0:
        verdict = "differs"
    text = f"{points(difference, low, high)} against {counted(runs, 'run')} of the same recipe in one process ({how})"
    return Twin(difference, low, high, verdict, runs, text)


def _noise(accuracy: float, sides: Iterable[dict[int, float]], samples: int) -> tuple[float, str]:
    """How far one run may be off by chance, at 95 %, and how that is known: by the spread of seeds, else by drawing the test samples."""
    known = [list(side.values()) for side in sides if len(side) > 1]
    degrees = sum(len(values) - 1 for values in known)
    if degrees >= FEWEST_DEGREES:
        spread = math.sqrt(sum(statistics.variance(values) * (len(values) - 1) for values in known) / degrees)
        how = f"seeds alone differ by {100 * spread:.2f} points, the standard deviation of {degrees + len(known)} runs"
        return t_quantile(ALPHA, degrees) * spread, how
    # One right and one wrong more: all samples right would leave nothing to chance.
    share = (accuracy * samples + 1) / (samples + 2)
    drawn = 1.96 * math.sqrt(share * (1 - share) / (samples + 2))
    return drawn, f"by drawing {samples:,} test samples alone; seeds may differ by more"


def _by_seed(runs: Iterable[RunView]) -> dict[int, float]:
    """The accuracy for each seed: the same seed again is no new evidence."""
    found: dict[int, list[float]] = {}
    for run in runs:
        accuracy = value(run, "accuracy", None)
        if accuracy is not None:
            found.setdefault(run.spec().recipe.seed, []).append(accuracy)
    return {seed: statistics.fmean(values) for seed, values in found.items()}


def _alike(one: Spec, other: Spec) -> bool:
    """Whether two runs compute the same on as many ranks."""
    placements = [(spec.placement.ranks, changes_mathematics(spec.placement, spec.recipe)) for spec in (one, other)]
    return placements[0] == placements[1] and same_recipe(one, other)


def same_recipe(one: Spec, other: Spec, free: tuple[str, ...] = ()) -> bool:
    """Whether two runs compute the same apart from randomness: global batch and learning rate count, not how they were stated."""
    return _key(one, free) == _key(other, free)


def _key(spec: Spec, free: tuple[str, ...]) -> dict[str, object]:
    found: dict[str, object] = {**dotted(global_terms(spec.recipe)), "optimizer.lr": spec.plan.lr}
    return {key: each for key, each in found.items() if key not in (*FREE, *free)}
