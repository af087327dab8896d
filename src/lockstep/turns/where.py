"""Where the difference between two contenders lies: in which phase of the step."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from lockstep.turns.estimate import Window
from lockstep.units import counted, duration, percent

# Medians of rounds that differ by less say nothing.
SAME = 0.01
# Phases beyond their share: so many are named, where each is at least this part of all that is beyond.
NAMED, PART = 2, 0.2


def where(one: str, other: str, windows: Sequence[Window]) -> str:
    """Which phase has the largest part of the difference, for each sample; empty where nobody knows the phases of one of them."""
    rounds: dict[tuple[int, int], dict[str, Window]] = {}
    for window in windows:
        if window.phases:
            rounds.setdefault((window.start, window.round), {})[window.contender] = window
    both = [found for found in rounds.values() if {one, other} <= found.keys()]
    if not both:
        return ""
    return told(*(_phases([found[name] for found in both]) for name in (one, other)))


def told(ours: Mapping[str, float], theirs: Mapping[str, float]) -> str:
    """In words, from the seconds of each phase of a sample on both sides, and of the whole as `total`."""
    whole, others = ours["total"], theirs["total"]
    if abs(whole / others - 1) < SAME:
        return f"a sample takes {duration(whole)} in both"
    way = 1 if whole > others else -1
    phase = max((name for name in ours if name != "total"), key=lambda name: way * (ours[name] - theirs.get(name, 0.0)))
    return (
        f"a sample takes {duration(whole)} instead of {duration(others)}; "
        f"the largest part of that is {phase}, {duration(ours[phase])} instead of {duration(theirs.get(phase, 0.0))}"
    )


def by_cores(cores: int, others: int, exchange: float) -> str:
    """Where one side has more cores, every phase differs: what counts is that, and what share of a step is exchange."""
    told = f"{counted(cores, 'core')} instead of {others}"
    return f"{told}; {percent(exchange)} of a step is exchange" if exchange > 0 else told


def despite_cores(cores: int, others: int, ours: Mapping[str, float], theirs: Mapping[str, float]) -> str:
    """Where the side with more cores is slower: which phases take longer than their share, from the seconds of each phase of a sample."""
    (most, slow), (few, fast) = sorted([(cores, ours), (others, theirs)], key=lambda side: -side[0])
    shares = {phase: fast.get(phase, 0.0) * few / most for phase in slow if phase != "total"}
    beyond = {phase: slow[phase] - share for phase, share in shares.items() if slow[phase] > share}
    largest = sorted(beyond, key=lambda phase: -beyond[phase])[:NAMED]
    said = [
        f"{phase} takes {duration(slow[phase])}"
        + (f" where its share is {duration(shares[phase])}" if shares[phase] > 0 else "")
        for phase in largest
        if beyond[phase] > PART * sum(beyond.values())
    ]
    return f"{counted(cores, 'core')} instead of {others}" + (f"; with {most}, {' and '.join(said)}" if said else "")


def _phases(windows: Sequence[Window]) -> dict[str, float]:
    """Seconds of each phase for a sample, the median over windows, and of the whole."""
    found = {
        phase: statistics.median(window.phases.get(phase, 0.0) / window.samples for window in windows)
        for phase in windows[0].phases
    }
    return {**found, "total": statistics.median(window.cost("wall") for window in windows)}
