"""Where the difference between two contenders lies: in which phase of the step."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from lockstep.turns.estimate import Window

# Medians of windows that differ by less say nothing.
SAME = 0.01


def where(fast: str, slow: str, windows: Sequence[Window]) -> str:
    """Which phase has most of the difference, for each sample; empty where nobody knows the phases of one of them."""
    fast_us, slow_us = (_phases(name, windows) for name in (fast, slow))
    if not fast_us or not slow_us:
        return ""
    whole, slower = fast_us.pop("total"), slow_us.pop("total")
    if abs(slower / whole - 1) < SAME:
        return f"a sample takes {whole:.1f} µs in both"
    phase = max(slow_us, key=lambda name: slow_us[name] - fast_us.get(name, 0.0))
    return (
        f"a sample takes {whole:.1f} µs instead of {slower:.1f} µs, "
        f"and most of that is in {phase}: {fast_us.get(phase, 0.0):.1f} µs instead of {slow_us[phase]:.1f} µs"
    )


def _phases(name: str, windows: Sequence[Window]) -> dict[str, float]:
    """Microseconds of each phase for a sample, the median over windows, and of the whole."""
    mine = [window for window in windows if window.contender == name and window.phases]
    if not mine:
        return {}
    names = mine[0].phases
    found = {
        phase: statistics.median(window.phases.get(phase, 0.0) / window.samples for window in mine) for phase in names
    }
    found["total"] = statistics.median(window.cost("wall") for window in mine)
    return {phase: 1e6 * seconds for phase, seconds in found.items()}
