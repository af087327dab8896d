"""What a race can tell apart: the same placement twice, and with 3 % and 1 % more work, again and again.

The work is planted where it is known to be exact: the second contender takes 34 steps where it says 33, or 101 where it says 100.
So windows have at least that many steps.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.record import Measurement, Section, compare
from benchmarks.settings import Settings
from lockstep.settings import load
from lockstep.turns import Budget, Race, Ranks, Taken, estimate

WORDS = ["ranks=1", "threads=1"]
BASELINE = "baseline"


@dataclass(frozen=True)
class Plant:
    """So much more work, to be found within so many seconds."""

    extra: float
    budget_s: float
    trials: float  # for each repeat
    fewest_steps: int
    margin: float = estimate.MARGIN

    @property
    def name(self) -> str:
        return f"{self.extra:.0%} more work" if self.extra else "the same twice"


PLANTED = (Plant(0.0, 60.0, 4, 33), Plant(0.03, 60.0, 4, 33), Plant(0.01, 300.0, 0.6, 100, margin=0.005))


class Planted(Ranks):
    """Ranks that do more than they are asked for."""

    def __init__(self, extra: float, *rest: Any) -> None:
        super().__init__(*rest)
        self._extra = extra

    def take(self, lead: int, steps: int) -> Taken:
        taken = super().take(lead, round(steps * (1 + self._extra)))
        return dataclasses.replace(taken, samples=taken.samples * steps / round(steps * (1 + self._extra)))


def measure(settings: Settings) -> Section:
    section = Section("turns", "Planted differences, each found or not within its time", "image", "rate", [])
    verdicts: dict[Plant, Counter[str]] = {plant: Counter() for plant in PLANTED}
    seconds: dict[Plant, list[float]] = {plant: [] for plant in PLANTED}
    trials = {plant: 1 if settings.quick else max(1, round(plant.trials * settings.repeats)) for plant in PLANTED}
    for trial in range(1, max(trials.values()) + 1):
        for plant in [plant for plant in PLANTED if trial <= trials[plant]]:
            race = _trial(plant, settings.seed + trial)
            (ratio,) = race.ratios()
            verdicts[plant][ratio.verdict] += 1
            seconds[plant].append(race.elapsed)
            _add(section, trial, plant, race)
            print(
                f"[turns] {trial}/{trials[plant]}: {plant.name}: {ratio.verdict}, {race.elapsed:.0f} s", file=sys.stderr
            )
    for plant in PLANTED:
        if one := compare(section.measurements, plant.name, f"{BASELINE} of {plant.name}", "share"):
            section.comparisons.append(one)
        counts = ", ".join(f"{verdict} {count}" for verdict, count in verdicts[plant].most_common())
        longest = max(seconds[plant])
        section.notes.append(
            f"{plant.name}, {trials[plant]} trials of up to {plant.budget_s:.0f} s, 'the same' within {plant.margin:.1%}: {counts}; the longest took {longest:.0f} s."
        )
    section.notes.append(f"Placement: {' '.join(WORDS)}. An interval is over starts, at {1 - estimate.LEVEL:.1%}.")
    return section


def _trial(plant: Plant, seed: int) -> Race:
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        recipe, placement = load([], WORDS)
        contenders = [
            Ranks("a", recipe, placement, Path(folder) / "a"),
            Planted(plant.extra, "b", recipe, placement, Path(folder) / "b"),
        ]
        race = Race(
            contenders, Budget(seconds=plant.budget_s, margin=plant.margin), seed=seed, fewest_steps=plant.fewest_steps
        )
        race.run()
        return race


def _add(section: Section, trial: int, plant: Plant, race: Race) -> None:
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
    for contender, name in (("a", f"{BASELINE} of {plant.name}"), ("b", plant.name)):
        mine = [window for window in race.windows if window.contender == contender]
        units = round(sum(window.samples for window in mine))
        wall, cpu = sum(window.wall for window in mine), sum(window.cpu for window in mine)
        order = len(section.measurements) + 1
        section.measurements.append(
            Measurement(order, trial, name, units, wall, cpu, details if contender == "b" else {})
        )
