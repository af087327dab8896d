"""Ways to take a step, as a probe has measured them against each other within the same few seconds (docs/explain.md)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from lockstep.reading import Damaged, read_shape
from lockstep.recipe import Positive, PositiveFloat
from lockstep.run import Run
from lockstep.shapes import Count, Number, Spent

# Where the ways measured for a run are kept, within its folder.
BESIDE = "explain/ways"
FILE = "ways.json"
# A probe takes no more.
MOST_ROUNDS = 25
# In the first rank's folder: how far a probe has come.
ROUND_FILE = "round.json"


Rounds = Annotated[list[Annotated[list[PositiveFloat], Meta(min_length=1)]], Meta(min_length=1)]


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """One way to take a step.

    whole         one process with the whole global batch, the other ranks idle
    plain         one process with one rank's share of it, the others idle
    wrapped       the same inside the placement's strategy, in a group of one
    apart         all ranks at once, each in a group of its own: nothing is exchanged
    together      all ranks at once, as the run trains
    no-data       together, with one batch that is used again and again: no loader
    double        together, with twice the batch
    fewer-threads together, with as many threads as there are cores for; where these are enough, with half of them
    large-buckets together, with DDP's default buckets (where they are smaller)
    plain@64, apart@64, …    the same with 64 samples a rank (for `lockstep predict`)
    """

    name: str
    samples: Count
    """In one rank's step."""
    ranks: Positive
    """How many took steps at the same time."""
    threads: Count
    steps: Count
    """In one round."""
    rounds: Rounds
    """Seconds of a step (mean of the round's steps), by round and rank."""
    phases: list[dict[str, Number]]
    """Mean seconds of each phase, by rank; `waiting` is the part of exchange beyond that of the rank that waited least."""
    exchange: list[Number] = []
    """Seconds of a step in each round, the mean over ranks."""
    waiting: list[Number] = []

    @property
    def by_round(self) -> list[float]:
        """Seconds of a step in each round, the mean over ranks."""
        return [statistics.fmean(ranks) for ranks in self.rounds]

    @property
    def seconds(self) -> float:
        """The middle over rounds."""
        return statistics.median(self.by_round)

    def beyond(self, other: Way) -> list[float]:
        """By how many seconds a step takes longer than one of `other`, round by round."""
        return [mine - theirs for mine, theirs in zip(self.by_round, other.by_round, strict=True)]


def pooled(starts: Sequence[dict[str, Way]]) -> dict[str, Way]:
    """The ways that were measured in all starts, with the rounds of all of them."""
    names = [name for name in starts[0] if all(name in each for each in starts)]
    return {name: _pooled([each[name] for each in starts]) for name in names}


def _pooled(ways: Sequence[Way]) -> Way:
    phases = [
        {phase: statistics.fmean(way.phases[rank][phase] for way in ways) for phase in ways[0].phases[rank]}
        for rank in range(ways[0].ranks)
    ]
    return msgspec.structs.replace(
        ways[0],
        rounds=[rounds for way in ways for rounds in way.rounds],
        exchange=[value for way in ways for value in way.exchange],
        waiting=[value for way in ways for value in way.waiting],
        phases=phases,
    )


# What readers ask for in `phases`.
_TOLD = {"data", "forward", "backward", "exchange", "optimizer", "waiting", "other", "total"}


class _Ways(msgspec.Struct):
    ways: list[Way]
    spent: Spent | None = None
    """While they were measured."""


def read(folder: Path) -> dict[str, Way]:
    """The ways measured in a folder, by name; empty where nothing was (or not to the end), or where it is damaged."""
    try:
        return check(folder)
    except Damaged:
        return {}


def spent_in(folder: Path) -> Spent | None:
    """The processors that a probe used, and could not have; None where it does not say."""
    try:
        content = read_shape(folder / FILE, _Ways)
    except Damaged:
        return None
    return content.spent if content else None


def check(folder: Path) -> dict[str, Way]:
    """The same, but what is damaged is an error."""
    content = read_shape(folder / FILE, _Ways)
    if content is None or Run(folder).recorded_status()["state"] != "done":
        return {}
    if any(not way.phases or any(_TOLD - phases.keys() for phases in way.phases) for way in content.ways):
        raise Damaged(f"{FILE}: a way lacks some of the phases of a step")
    if len({len(way.rounds) for way in content.ways}) > 1:
        raise Damaged(f"{FILE}: its ways have different numbers of rounds")
    return {way.name: way for way in content.ways}
