"""What a race can tell apart: the same placement twice, and once with 3 % more work, again and again.

The work is planted where it is known to be exact: the second contender takes 34 steps where it says 33. So windows have at least 33 steps.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.record import Measurement, Section, compare
from benchmarks.settings import Settings
from lockstep.settings import load
from lockstep.turns import Budget, Race, Ranks, Taken, estimate

PLANTED = (0.0, 0.03)
TRIALS = 4  # for each repeat: twenty by default
BUDGET_S = 60.0
WORDS = ["ranks=1", "threads=1"]
BASELINE = "baseline"
FEWEST_STEPS = 33


class Planted(Ranks):
    """Ranks that do more than they are asked for."""

    def __init__(self, extra: float, *rest: Any) -> None:
        super().__init__(*rest)
        self._extra = extra

    def take(self, lead: int, steps: int) -> Taken:
        taken = super().take(lead, round(steps * (1 + self._extra)))
        return dataclasses.replace(taken, samples=taken.samples * steps / round(steps * (1 + self._extra)))


def measure(settings: Settings) -> Section:
    title = f"Planted differences, each found or not within {BUDGET_S:.0f} s"
    section = Section("turns", title, "image", "rate", [])
    trials = 1 if settings.quick else TRIALS * settings.repeats
    verdicts: dict[float, Counter[str]] = {extra: Counter() for extra in PLANTED}
    seconds: dict[float, list[float]] = {extra: [] for extra in PLANTED}
    for trial in range(1, trials + 1):
        for extra in PLANTED:
            race = _trial(extra, settings.seed + trial)
            (ratio,) = race.ratios()
            verdicts[extra][ratio.verdict] += 1
            seconds[extra].append(race.elapsed)
            _add(section, trial, extra, race)
            print(f"[turns] {trial}/{trials}: {_name(extra)}: {ratio.verdict}, {race.elapsed:.0f} s", file=sys.stderr)
    for extra in PLANTED:
        if one := compare(section.measurements, _name(extra), f"{BASELINE} of {_name(extra)}", "share"):
            section.comparisons.append(one)
        counts = ", ".join(f"{verdict} {count}" for verdict, count in verdicts[extra].most_common())
        longest = max(seconds[extra])
        section.notes.append(f"{_name(extra)}, {trials} trials: {counts}; each took at most {longest:.0f} s.")
    section.notes.append(
        f"Placement: {' '.join(WORDS)}. An interval is over starts, at {1 - estimate.LEVEL:.1%}; the margin of 'the same' is {estimate.MARGIN:.0%}."
    )
    return section


def _name(extra: float) -> str:
    return f"{extra:.0%} more work" if extra else "the same twice"


def _trial(extra: float, seed: int) -> Race:
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        recipe, placement = load([], WORDS)
        contenders = [
            Ranks("a", recipe, placement, Path(folder) / "a"),
            Planted(extra, "b", recipe, placement, Path(folder) / "b"),
        ]
        race = Race(contenders, Budget(seconds=BUDGET_S), seed=seed, fewest_steps=FEWEST_STEPS)
        race.run()
        return race


def _add(section: Section, trial: int, extra: float, race: Race) -> None:
    (ratio,) = race.ratios()
    details = {
        "verdict": ratio.verdict,
        "effect": ratio.effect,
        "low": ratio.low,
        "high": ratio.high,
        "starts": race.starts,
        "disturbed": race.disturbed,
        "seconds": round(race.elapsed, 1),
        # What the machine's noise is like, for simulations.
        "log_ratios": [[round(value, 5) for value in rounds] for rounds in estimate.by_start(race.windows, "b", "a")],
    }
    for contender, name in (("a", f"{BASELINE} of {_name(extra)}"), ("b", _name(extra))):
        mine = [window for window in race.windows if window.contender == contender]
        units = round(sum(window.samples for window in mine))
        wall, cpu = sum(window.wall for window in mine), sum(window.cpu for window in mine)
        order = len(section.measurements) + 1
        section.measurements.append(
            Measurement(order, trial, name, units, wall, cpu, details if contender == "b" else {})
        )
