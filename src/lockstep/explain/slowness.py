"""Why is a rank slow, and what does it cost? Where its longer work lies says the first; what all would take without it, the second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lockstep.explain import blocks
from lockstep.explain.evidence import Evidence
from lockstep.measure.phases import Rows
from lockstep.measure.records import PHASES
from lockstep.units import duration, percent

# Work that is longer in one phase alone has at least this share of the excess there; a slow processor makes all of them longer.
IN_ONE_PLACE = 2 / 3
# And at least this share of it is waiting for a processor, if something else runs there.
BY_OTHERS = 0.5


class Reason(NamedTuple):
    """`cause` is one word: loader, besides, neighbour, or rank (host) where it is the processor itself."""

    cause: str
    text: str
    advice: str


def cost(work: Rows, slow: Sequence[int]) -> blocks.Mean:
    """Seconds of a step that would be saved if these ranks (rows) worked as long as the others: all wait for the longest.

    The middle over blocks of steps: a pause of the machine, on whichever rank, is not what is asked about.
    """
    others = [rank for rank in range(len(work)) if rank not in slow]
    excess = np.median(blocks.means(work[list(slow)].mean(axis=0) - work[others].mean(axis=0)))
    faster = work.copy()
    faster[list(slow)] -= excess
    return blocks.middle(work.max(axis=0) - faster.max(axis=0))


def reason(evidence: Evidence, slow: Sequence[int], kind: str) -> Reason:
    """`kind`: rank or host."""
    others = [rank for rank in range(len(evidence.ranks)) if rank not in slow]
    parts = evidence.run.split()

    def beyond(values: Any) -> float:
        return float(np.mean([values[rank] for rank in slow]) - np.mean([values[rank] for rank in others]))

    places = {name: beyond([part[name] for part in parts]) for name in (*PHASES, "other") if name not in ("exchange",)}
    excess = sum(places.values())
    most = max(places, key=lambda name: places[name])
    share = places[most] / excess if excess > 0 else 0.0
    what = f"{percent(min(1.0, share))} of what it works longer is "
    if share >= IN_ONE_PLACE and most == "data":
        return Reason("loader", f"{what}in its loader", "see where it reads its data from")
    if share >= IN_ONE_PLACE and most in ("other", "optimizer"):
        where = "beside the phases of a step" if most == "other" else "after its backward"
        return Reason(
            "besides",
            f"{what}{where}: logging, printing or a callback that only it has",
            "log every few steps, and from another thread",
        )
    waits = beyond([delayed(evidence, rank) for rank in range(len(parts))]) - _by_its_own(evidence, slow, others)
    if excess > 0 and waits >= BY_OTHERS * excess:
        return Reason(
            "neighbour",
            f"it could run and had no processor for {duration(waits)} a step: something else runs on its cores",
            "find it with 'top', and keep the cores of the ranks free",
        )
    return Reason(kind, "", "")


def _by_its_own(evidence: Evidence, slow: Sequence[int], others: Sequence[int]) -> float:
    """Seconds of a step that slow ranks wait longer for a processor only because they have more to do on it; 0 where that was not recorded."""
    ran = [float(rank.get("ran_seconds") or 0.0) for rank in evidence.run.attached_ranks()]
    if len(ran) < len(evidence.ranks) or not all(ran):
        return 0.0
    more = float(np.mean([ran[rank] for rank in slow]) / np.mean([ran[rank] for rank in others])) - 1
    return max(0.0, more) * float(np.mean([delayed(evidence, rank) for rank in others]))


def delayed(evidence: Evidence, rank: int) -> float:
    """Seconds of a step in which a rank could have run and had no processor; 0 where it was not recorded."""
    told = evidence.run.attached_ranks()
    if rank < len(told):
        return float(told[rank].get("delayed_seconds") or 0.0) / max(1, int(told[rank].get("steps") or 0))
    found = [epoch for epoch in evidence.run.epochs(rank) if epoch.get("delayed_seconds") is not None]
    steps = sum(int(epoch.get("steps") or 0) for epoch in found)
    return sum(float(epoch["delayed_seconds"]) for epoch in found) / steps if steps else 0.0


def neighbour(evidence: Evidence, step: float) -> blocks.Mean:
    """Seconds of a step that all lose because ranks had no processor now and then: at least what the one with most of it lost, at most
    what they lost in all, since they wait for each other, and never more than the step; the middle of both."""
    each = [delayed(evidence, rank) for rank in range(len(evidence.ranks))]
    least, most = min(max(each), step), min(sum(each), step)
    return blocks.Mean((least + most) / 2, least, most)
