"""How much of its cores a training had: the one definition, which run, race, study, explain and predict all speak of (docs/machine.md).

Linux counts for every thread how long it ran, and how long it could have run and had no processor. Threads that wait behind other threads of
their own training were not starved by the machine, so no more of that waiting counts than other processes ran meanwhile. What a hypervisor
took is counted for the machine as a whole: the training's part of it is its part of what ran.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from time import process_time

from lockstep.machine.cpu import TICKS_S, children_seconds, seconds_of, ticks, waited_seconds
from lockstep.process import LINK
from lockstep.shapes import Spent
from lockstep.units import percent

STARVED = 0.9
"""Below this share, times say as much about the other work as about the training (docs/machine.md has the measurement)."""
# So many processor seconds have to be asked for before anything is said: in less, a single pause of the system is a large share.
LEAST_S = 0.5
# Begins a sentence about times that were measured beside other work: it is true of that hour, and may not be on a quiet machine.
BESIDE = "Beside other work: "
DOUBT = "not to be trusted: the machine was starved"
"""The same words wherever something is said of times that were measured on a starved machine."""
UNEQUAL = f"times are {DOUBT}; threads that wait for each other lose more by it than one that waits for nobody"
ADVICE = "end the other work ('top' shows it), and run it again"
AGAIN = "again, when the other work has ended: 'top' shows it"
"""The same beside a command that does it."""


def had(spent: Spent | None) -> float | None:
    """The share of the processor time it asked for that a training got; None where that is not known, or too little was asked for."""
    if spent is None or spent["used"] <= 0:
        return None
    used, others = spent["used"], max(0.0, spent["others"])
    lost = min(spent["waited"], others) + spent["stolen"] * used / (used + others)
    return used / (used + lost) if used + lost >= LEAST_S else None


def starved(share: float | None) -> bool:
    """Whether it is too little for times to be believed; what is not known is not blamed."""
    return share is not None and share < STARVED


def sentence(share: float, who: str = "you had", whose: str = "your") -> str:
    """The same words everywhere."""
    return f"{who} {percent(share)} of {whose} cores: other work on this machine had the rest"


def total(parts: Iterable[Spent]) -> Spent | None:
    """Of several spans together; None where there are none."""
    found = list(parts)
    if not found:
        return None
    return Spent(
        used=sum(part["used"] for part in found),
        waited=sum(part["waited"] for part in found),
        others=sum(part["others"] for part in found),
        stolen=sum(part["stolen"] for part in found),
    )


def link_seconds() -> float:
    """Processor seconds of the user-space link between emulated hosts: what carries a training's bytes is no other work. 0 where there is none."""
    pid = int(os.environ.get(LINK, 0))
    return seconds_of(pid) if pid else 0.0


class Meter:
    """What this process has spent since a moment. `first`: it is the one process of its machine that counts what the machine did.

    What others ran is what the machine ran less what this training ran: each of its processes takes its own part off, so it is right in the
    sum over all of them only.
    """

    def __init__(self, first: bool) -> None:
        self._first = first
        self._began = self._now()

    def read(self) -> Spent:
        used, waited, helpers, busy, stolen = (
            now - before for now, before in zip(self._now(), self._began, strict=True)
        )
        machine = (busy, stolen) if self._first else (0.0, 0.0)
        return Spent(used=used, waited=max(0.0, waited), others=machine[0] - used - helpers, stolen=machine[1])

    def _now(self) -> tuple[float, ...]:
        machine = ticks()
        helpers = children_seconds() + (link_seconds() if self._first else 0.0)
        return process_time(), waited_seconds(), helpers, machine.busy / TICKS_S, machine.stolen / TICKS_S
