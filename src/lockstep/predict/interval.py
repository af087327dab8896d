"""Intervals of predictions: as wide as the errors that predictions of the same kind had on held-out placements of this machine.

Errors are taken as factors (logarithms), around a ratio of one: a model that is always 5 % too fast has earned no narrower interval for it.
Beyond the most ranks that were checked of a kind, the interval widens by as much again with every doubling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lockstep.predict.fit import Fit
from lockstep.predict.model import Case, rounds
from lockstep.statistics import t_quantile

LIKELY, NEARLY_SURE = 0.5, 0.9
# Fewer errors of a kind say too little about their size.
FEWEST, BORROWED = 2, 2

KINDS = {
    "batch": "another batch of one rank",
    "ranks": "another batch of several ranks",
    "accumulation": "a step of several passes",
    "local SGD": "weights averaged now and then",
    "crowded": "more ranks than cores",
    "link": "two hosts and a link",
    "hosts": "more than two hosts",
    "strategy": "a strategy that sends more than one sum",
}


class Interval(NamedTuple):
    low: float
    high: float


def kind_of(fit: Fit, case: Case) -> str:
    """What has to be predicted about it; the hardest, where it is several things."""
    if case.ranks > 1 and not rounds(fit, case) and _sends_more(fit):
        return "strategy"
    if case.hosts > 1:
        return "hosts" if case.hosts > 2 else "link"
    if case.per_host * (fit.placement.threads or 1) > fit.cores:
        return "crowded"
    if case.ranks > 1 and rounds(fit, case):
        return "local SGD"
    if case.accumulation > 1:
        return "accumulation"
    return "ranks" if case.ranks > 1 else "batch"


def _sends_more(fit: Fit) -> bool:
    """Whether a step is more than gradients that are added up as they are."""
    placement = fit.placement
    compresses = placement.strategy == "ddp" and placement.ddp.hook != "none"
    return bool(fit.norms) or placement.zero or placement.strategy == "fsdp" or compresses


def spread(errors: Sequence[float], everyone: Sequence[float], placements: int) -> float:
    """How large errors of a kind are: the root of the mean square of their logarithms, over so many placements.

    Few placements may have been lucky, so it is as if there had been two more, with errors of the size of everyone's.
    """
    return math.sqrt((placements * _square(errors) + BORROWED * _square(everyone)) / (placements + BORROWED))


def _square(errors: Sequence[float]) -> float:
    return sum(math.log1p(error) ** 2 for error in errors) / len(errors)


def interval(
    seconds: float, kind: str, ranks: int, earned: Mapping[str, Mapping[str, Any]], level: float
) -> Interval | None:
    """Where a share of `level` of such predictions ends up; None where too few of the kind were checked."""
    one = earned.get(kind)
    if one is None or one["placements"] < FEWEST:
        return None
    wider = 1 + max(0.0, math.log2(ranks / one["most_ranks"]))
    half = t_quantile(1 - level, int(one["placements"])) * one["spread"] * wider
    return Interval(seconds * math.exp(-half), seconds * math.exp(half))
