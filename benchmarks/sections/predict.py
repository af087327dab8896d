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
from lockstep.predict.score import sentence

# A check of 56 placements took 35 minutes, with three starts of everything in it.
MOST_REPEATS = 1


def measure(settings: Settings) -> Section:
    """A share of 102 % means that the run took 2 % less than predicted."""
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as kept:
        repeats = min(MOST_REPEATS, settings.repeats)
        found = check.run(settings.quick, _tell, Path(kept), repeats)
    title = "Predicted and measured steps of placements that were not fitted"
    section = Section("predict", title, "step", "milliseconds", [])
    cases: dict[str, list[dict[str, Any]]] = {}
    for case in found["cases"]:
        cases.setdefault(f"{case['fit']}: {case['placement']}", []).append(case)
    for name, same in cases.items():
        _add(section, name, same)
    section.notes += [
        f"{sentence(found)}.",
        "An error is (measured - predicted) / predicted, of each prediction by itself.",
    ]
    section.notes += [
        f"{kind}: {one['n']} predictions, median error {one['median_error']:.1%}, worst {one['worst_error']:.1%}, "
        f"mean with its sign {one['mean_signed']:+.1%}."
        for kind, one in found["kinds"].items()
    ]
    section.notes += [
        f"Fit of {one['fit']}: {one['seconds']:.0f} s, batches {one['batches']}." for one in found["fits"]
    ]
    section.notes += [f"Not measured: {text}" for text in found["failed"]]
    if found["left_out"]:
        section.notes.append(f"Links were left out: {found['left_out']}")
    return section


def _add(section: Section, name: str, cases: list[dict[str, Any]]) -> None:
    for number, case in enumerate(cases, 1):
        for words in ("predicted", "measured"):
            order = len(section.measurements) + 1
            # Steps are timed by the wall clock alone.
            value = case[f"{words}_ms"] / 1e3
            section.measurements.append(Measurement(order, number, f"{name}, {words}", 1, value, 0.0))
    one = compare(section.measurements, f"{name}, predicted", f"{name}, measured", "share")
    if one:
        section.comparisons.append(one)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
