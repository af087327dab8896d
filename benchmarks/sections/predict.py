"""What `lockstep predict` is worth: predictions of placements that were not fitted, against real runs of them.

It is `lockstep predict --check`, with every run's time in the record. Its fits are kept in a folder of their own, so that the figures
that a user's predictions are printed with stay those of the user's own check.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.record import Measurement, Section, compare
from benchmarks.settings import Settings
from lockstep.predict import check

MOST_REPEATS = 2


def measure(settings: Settings) -> Section:
    """A share of 102 % means that the run took 2 % less than predicted."""
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as kept:
        repeats = min(MOST_REPEATS, settings.repeats)
        found = check.run(settings.quick, _tell, Path(kept), repeats)
    title = "Predicted and measured steps of placements that were not fitted"
    section = Section("predict", title, "step", "milliseconds", [])
    for case in found["cases"]:
        _add(section, case)
    section.notes += [
        f"Median error {found['median_error']:.1%}, worst {found['worst_error']:.1%} of {found['n']} single predictions "
        f"(goal {check.GOAL_MEDIAN:.0%} and {check.GOAL_WORST:.0%}: {'met' if found['goal_met'] else 'missed'}).",
        f"The machine itself changed its speed by up to {found['drift']:+.1%} between two fits of the same placement.",
        "An error is (measured - predicted) / predicted, of each prediction by itself.",
    ]
    if found["detours_ms"]:
        own = ", ".join(f"{each:.2f}" for each in found["detours_ms"])
        section.notes.append(
            f"A hop between emulated hosts takes {own} ms by itself, which the predictions for links contain."
        )
    section.notes += [
        f"{case['what']}: {case['fit']}, {case['placement']}: {', '.join(f'{error:+.1%}' for error in case['errors'])}"
        for case in found["cases"]
    ]
    section.notes += [
        f"Fit of {one['fit']}: {one['seconds']:.0f} s, batches {one['batches']}." for one in found["fits"]
    ]
    if found["left_out"]:
        section.notes.append(f"Links were left out: {found['left_out']}")
    return section


def _add(section: Section, case: dict[str, Any]) -> None:
    name = f"{case['fit']}: {case['placement']}"
    for number, both in enumerate(zip(case["predictions_ms"], case["runs_ms"], strict=True), 1):
        for words, value in zip(("predicted", "measured"), both, strict=True):
            order = len(section.measurements) + 1
            # Steps are timed by the wall clock alone.
            section.measurements.append(Measurement(order, number, f"{name}, {words}", 1, value / 1e3, 0.0))
    one = compare(section.measurements, f"{name}, predicted", f"{name}, measured", "share")
    if one:
        section.comparisons.append(one)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
