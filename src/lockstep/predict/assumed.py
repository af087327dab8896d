"""Ranges of predictions from an attached command: nothing of it was fitted or checked, so each assumption is taken at both of its ends.

computing     another start of the same script is up to 10 % faster or slower
contention    none, or three times what is assumed, where more or fewer ranks share a host than were seen
exchange      all of it that can be hidden is hidden, or nothing is; and 10 % either way for every doubling of the ranks
waiting       none, or twice as much
"""

from __future__ import annotations

import math

from lockstep.predict.attached import Shown
from lockstep.predict.fit import Fit
from lockstep.predict.interval import Interval
from lockstep.predict.messages import exposed
from lockstep.predict.model import beyond, costs, rounds, sent
from lockstep.predict.scaling import Row

AGAIN, CONTENDED, DOUBLING, LATE = 1.1, 3.0, 1.1, 2.0
SAID = (
    "nothing of this script was fitted or checked, so a range is no interval of a stated probability: it goes from the best to the worst "
    "of what is assumed (docs/predict.md)"
)


def bounds(fit: Fit, seen: Shown, row: Row) -> Interval:
    """Seconds of a step, with every assumption at its best and at its worst."""
    step, case = row.step, row.case
    assert step
    assert case
    few, many = _exchange(fit, seen, row) if case.ranks > 1 else (0.0, 0.0)
    least, most = _computing(fit, seen, row)
    low = least / AGAIN + few
    high = most + many + LATE * step.waiting
    return Interval(min(low, step.seconds), max(high, step.seconds))


def _computing(fit: Fit, seen: Shown, row: Row) -> tuple[float, float]:
    """The least and the most that a rank may compute: contention is an assumption for other numbers of ranks than were seen."""
    step, case = row.step, row.case
    assert step
    assert case
    if seen.ranks == 1:
        steady = step.compute + step.wrapper
        return steady, steady * AGAIN + CONTENDED * step.contention
    there = fit.parts(case.micro, 1, seen.ranks)
    whole = there.compute + there.contention
    now = step.compute + step.contention
    return whole - CONTENDED * max(0.0, whole - now), whole * AGAIN + CONTENDED * max(0.0, now - whole)


def _exchange(fit: Fit, seen: Shown, row: Row) -> tuple[float, float]:
    """The least and the most of an exchange that a step may have to wait for."""
    step, case = row.step, row.case
    assert step
    assert case
    cost, every = costs(fit, case), rounds(fit, case) or 1
    messages = sent(fit, case)
    missed = beyond(fit, case)
    backward = fit.parts(case.micro, 1, case.per_host).backward
    hidden = exposed(messages, 0.0 if every > 1 else backward, lambda message: cost(message)._replace(busy=0.0))
    open_ = sum(cost(message).seconds for message in messages)
    wider = DOUBLING ** max(0.0, math.log2(case.ranks / seen.ranks))
    few = min(step.exchange, max(0.0, hidden + missed) / every)
    many = max(step.exchange, (open_ + max(0.0, missed)) / every)
    return few / wider, many * wider
