"""Where the difference between two contenders lies: in which phase of the step."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from lockstep.turns.estimate import Window

# Medians of rounds that differ by less say nothing.
SAME = 0.01


def where(fast: str, slow: str, windows: Sequence[Window]) -> str:
    """Which phase has the largest part of the difference, for each sample; empty where nobody knows the phases of one of them."""
    rounds: dict[tuple[int, int], dict[str, Window]] = {}
    for window in windows:
        if window.phases:
            rounds.setdefault((window.start, window.round), {})[window.contender] = window
    both = [found for found in rounds.values() if {fast, slow} <= found.keys()]
    if not both:
        return ""
    fast_us, slow_us = (_phases([found[name] for found in both]) for name in (fast, slow))
    whole, slower = fast_us.pop("total"), slow_us.pop("total")
    if slower / whole - 1 < SAME:
        return f"a sample takes {whole:.1f} µs in both"
    phase = max(slow_us, key=lambda name: slow_us[name] - fast_us.get(name, 0.0))
    return (
        f"a sample takes {whole:.1f} µs instead of {slower:.1f} µs; "
        f"the largest part of that is {phase}, {fast_us.get(phase, 0.0):.1f} µs instead of {slow_us[phase]:.1f} µs"
    )


def _phases(windows: Sequence[Window]) -> dict[str, float]:
    """Microseconds of each phase for a sample, the median over windows, and of the whole."""
    found = {
        phase: statistics.median(window.phases.get(phase, 0.0) / window.samples for window in windows)
        for phase in windows[0].phases
    }
    found["total"] = statistics.median(window.cost("wall") for window in windows)
    return {phase: 1e6 * seconds for phase, seconds in found.items()}
