"""Where the difference between two contenders lies: in which phase of the step."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from lockstep.turns.estimate import Window
from lockstep.units import counted, duration, percent

# Medians of rounds that differ by less say nothing.
SAME = 0.01
# Of phases that take longer than they should.
MOST_NAMED = 2
Phases: TypeAlias = Mapping[str, float]


def phases(one: str, other: str, windows: Sequence[Window]) -> tuple[Phases, Phases] | None:
    """Seconds of each phase for a sample on both sides, in the rounds that both took part in, and of the whole as `total`."""
    rounds: dict[tuple[int, int], dict[str, Window]] = {}
    for window in windows:
        if window.phases:
            rounds.setdefault((window.start, window.round), {})[window.contender] = window
    both = [found for found in rounds.values() if {one, other} <= found.keys()]
    if not both:
        return None
    return _phases([found[one] for found in both]), _phases([found[other] for found in both])


def told(ours: Phases, theirs: Phases) -> str:
    """Which phase has the largest part of the difference, in words."""
    whole, others = ours["total"], theirs["total"]
    if abs(whole / others - 1) < SAME:
        return f"a sample takes {duration(whole)} in both"
    way = 1 if whole > others else -1
    phase = max((name for name in ours if name != "total"), key=lambda name: way * (ours[name] - theirs.get(name, 0.0)))
    return (
        f"a sample takes {duration(whole)} instead of {duration(others)}; "
        f"the largest part of that is {phase}, {duration(ours[phase])} instead of {duration(theirs.get(phase, 0.0))}"
    )


def by_cores(cores: int, others: int, phases: Phases) -> str:
    """Where one side has more cores and is faster, every phase differs: what counts is that, and what share of a step is no computing."""
    shares = [
        f"{percent(phases[name] / phases['total'])} of a step is {name}"
        for name in ("exchange", "waiting")
        if phases.get(name, 0.0) > 0
    ]
    return "; ".join([f"{counted(cores, 'core')} instead of {others}", *shares])


def beyond_share(more: int, fewer: int, slow: Phases, fast: Phases) -> str:
    """Where more cores are slower: what of a sample takes longer than their number lets expect. `slow`: the phases of those with more."""
    share = {name: slow[name] - fast.get(name, 0.0) * fewer / more for name in slow}
    beyond = sorted((name for name in share if name != "total" and share[name] > 0), key=share.__getitem__)[::-1]
    named = ", ".join(f"{name} {duration(share[name])}" for name in beyond[:MOST_NAMED])
    expected = duration(fast["total"] * fewer / more)
    return (
        f"with {counted(more, 'core')} instead of {fewer} a sample should take {expected} and takes {duration(slow['total'])}; "
        f"beyond its share of that: {named}"
    )


def _phases(windows: Sequence[Window]) -> Phases:
    """Seconds of each phase for a sample, the median over windows, and of the whole."""
    found = {
        phase: statistics.median(window.phases.get(phase, 0.0) / window.samples for window in windows)
        for phase in windows[0].phases
    }
    return {**found, "total": statistics.median(window.cost("wall") for window in windows)}
