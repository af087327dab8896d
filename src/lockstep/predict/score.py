"""What a check came to: errors of single predictions, by kind, whether intervals hold, and whether placements are in the right order."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lockstep.predict.held import Held
from lockstep.predict.interval import LIKELY, NEARLY_SURE, interval, spread

GOAL_HELD = (0.85, 0.95)
GOAL_MEDIAN, GOAL_NINE_OF_TEN, GOAL_RANKED, APART = 0.05, 0.12, 0.95, 0.05


class Tried(NamedTuple):
    """A held-out placement: what was predicted, and what was measured in the same rounds."""

    group: str
    held: Held
    predicted: float
    measured: float
    repeat: int = 0

    @property
    def error(self) -> float:
        return self.measured / self.predicted - 1


def summary(tried: Sequence[Tried]) -> dict[str, Any]:
    """Of relative errors, (measured - predicted) / predicted, each of a single prediction: that is what a user gets."""
    errors = [each.error for each in tried]
    sizes = [abs(error) for error in errors]
    median, nine = statistics.median(sizes), float(np.quantile(sizes, 0.9))
    ranked, held = ranking(tried), coverage(tried, NEARLY_SURE)
    half = 0.5 / len(tried)  # a share of so many is no finer
    return {
        "n": len(errors),
        "median_error": median,
        "ninth_decile": nine,
        "worst_error": max(sizes),
        "lowest": min(errors),
        "highest": max(errors),
        "ranked": ranked,
        "half_held": coverage(tried, LIKELY),
        "nine_of_ten_held": held,
        "goal_met": median <= GOAL_MEDIAN
        and nine <= GOAL_NINE_OF_TEN
        and (ranked is None or ranked >= GOAL_RANKED)
        and (held is None or GOAL_HELD[0] - half <= held <= GOAL_HELD[1] + half),
    }


def coverage(tried: Sequence[Tried], level: float) -> float | None:
    """How often an interval holds that comes from the errors of all other fits: errors of one fit are alike."""
    inside = []
    for each in tried:
        others = by_kind([other for other in tried if other.group != each.group])
        found = interval(each.predicted, each.held.kind, each.held.ranks, others, level)
        if found:
            inside.append(found.low <= each.measured <= found.high)
    return statistics.fmean(inside) if inside else None


def ranking(tried: Sequence[Tried]) -> float | None:
    """Of two placements of one recipe that differ by more than 5 % in time a sample: how often the faster one was predicted to be."""
    right = total = 0
    for one, other in itertools.combinations(tried, 2):
        if (one.group, one.repeat) != (other.group, other.repeat):
            continue
        measured = (one.measured / _batch(one.held)) / (other.measured / _batch(other.held))
        predicted = (one.predicted / _batch(one.held)) / (other.predicted / _batch(other.held))
        if abs(measured - 1) > APART:
            total += 1
            right += (measured > 1) == (predicted > 1)
    return right / total if total else None


def by_kind(tried: Sequence[Tried]) -> dict[str, dict[str, Any]]:
    kinds = dict.fromkeys(each.held.kind for each in tried)
    return {
        kind: {
            "n": len(errors),
            "placements": placements,
            "median_error": statistics.median(map(abs, errors)),
            "worst_error": max(map(abs, errors)),
            "mean_signed": statistics.fmean(errors),
            "spread": spread(errors, [each.error for each in tried], placements),
            "most_ranks": max(each.held.ranks for each in tried if each.held.kind == kind),
        }
        for kind in kinds
        if (errors := [each.error for each in tried if each.held.kind == kind])
        and (placements := len({(each.group, each.held) for each in tried if each.held.kind == kind}))
    }


def sentence(found: dict[str, Any]) -> str:
    """What a check came to."""
    ranked = (
        f"; of pairs that differ by more than {APART:.0%}, {found['ranked']:.0%} are in the right order"
        if found["ranked"] is not None
        else ""
    )
    if found["nine_of_ten_held"] is not None:
        ranked += f"; 90 % intervals from the other fits' errors hold in {found['nine_of_ten_held']:.0%}"
        ranked += f", 50 % intervals in {found['half_held']:.0%}"
    return (
        f"{found['n']} single predictions were off by {found['median_error']:.1%} in the median, nine of ten by at most "
        f"{found['ninth_decile']:.1%}, the worst by {found['worst_error']:.1%}{ranked} (goal {GOAL_MEDIAN:.0%}, {GOAL_NINE_OF_TEN:.0%}, "
        f"{GOAL_RANKED:.0%} and 85 to 95 %: {'met' if found['goal_met'] else 'missed'})"
    )


def _batch(held: Held) -> int:
    return held.number("global_batch")
