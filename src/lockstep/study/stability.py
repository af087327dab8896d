"""Whether the machine was quiet, noisy, drifting, or slow at first, with advice. Judged over all cells of a study together."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

# Spread from run to run: below 2 % is quiet; above 5 % small differences cannot be seen.
QUIET, NOISY = 0.02, 0.05
# Over the whole study: the smallest drift worth reporting, and its significance (z of the Mann-Kendall test: one false alarm in 100).
DRIFT, DRIFT_Z = 0.03, 2.58
FIRST_SLOW, FIRST_SPREADS = 0.05, 5.0
# Half of all normally distributed values are within so many standard deviations.
NORMAL_QUARTILE = 0.6745
# With fewer runs than this, drift and a slow first run are not judged.
ENOUGH = 6


@dataclass(frozen=True)
class Timed:
    """A run, or a start of a race: its cell, its place in time, how long it took."""

    cell: str
    began: float
    seconds: float


@dataclass(frozen=True)
class Stability:
    """The verdict, and the figures behind it."""

    verdict: str
    spread: float | None
    """The standard deviation of runs of one cell, as a share: from the median difference between two of them."""
    drift: float | None
    """Change from the first run to the last, as a share, by the Theil-Sen slope."""
    first: float | None
    """How much slower the first run was than its cell's median."""
    advice: list[str]
    starved: str = ""
    """That they had too little of their cores, in a sentence; empty where they had enough."""


def judge(runs: Sequence[Timed], what: str = "run", starved: str = "") -> Stability:
    """From every run that finished, or every start of a race, in any order. `starved`: that they had too little of their cores, where it is so."""
    ordered = sorted((run for run in runs if run.seconds > 0), key=lambda run: run.began)
    medians = _medians(ordered)
    rest = [math.log(run.seconds / medians[run.cell]) for run in ordered if run.cell in medians]
    found = ["starved"] if starved else []
    if len(rest) < 3:
        return Stability(", ".join([*found, f"too few {what}s to say"]), None, None, None, [], starved)
    advice = []
    spread = _spread(ordered)
    first = math.expm1(rest[0])
    drift = _drift(rest) if len(rest) >= ENOUGH else None
    if spread > NOISY:
        found.append("noisy")
        advice.append(f"{what}s of one cell differ by {spread:.1%}: end other programs, and keep pin=true")
    if drift is not None:
        found.append("drift")
        way = "slower" if drift > 0 else "faster"
        advice.append(
            f"{what}s became {abs(drift):.1%} {way} from first to last (heat, other load): comparisons stand, because cells took "
            "turns; times by themselves do not"
        )
    if what == "run" and len(rest) >= ENOUGH and first > max(FIRST_SLOW, FIRST_SPREADS * spread):
        found.append("first run slow")
        advice.append(
            f"the first run took {first:.0%} more than its cell's median (cold caches, first fetch): start once with --repeats 1, "
            "or add a repeat"
        )
    verdict = ", ".join(found) or ("quiet" if spread <= QUIET else "fair")
    return Stability(verdict, spread, drift, first, advice, starved)


def _medians(runs: Sequence[Timed]) -> dict[str, float]:
    """The median of each cell that has more than one run."""
    cells: dict[str, list[float]] = {}
    for run in runs:
        cells.setdefault(run.cell, []).append(run.seconds)
    return {cell: statistics.median(values) for cell, values in cells.items() if len(values) > 1}


def _spread(runs: Sequence[Timed]) -> float:
    """From differences between two runs of one cell, which know of no centre: of few runs, the one that is the median of its cell would count
    as no deviation at all. The median difference, so that a single pause of the machine does not make it noisy."""
    cells: dict[str, list[float]] = {}
    for run in runs:
        cells.setdefault(run.cell, []).append(math.log(run.seconds))
    apart = [abs(one - other) for values in cells.values() for one, other in combinations(values, 2)]
    return statistics.median(apart) / (math.sqrt(2) * NORMAL_QUARTILE)


def _drift(rest: Sequence[float]) -> float | None:
    """The change from first to last (Theil-Sen slope), where it is large enough to matter and significant (Mann-Kendall trend test)."""
    n = len(rest)
    pairs = [(i, j) for i in range(n) for j in range(i + 1, n)]
    score = sum((rest[j] > rest[i]) - (rest[j] < rest[i]) for i, j in pairs)
    z = score / math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    change = math.expm1(statistics.median((rest[j] - rest[i]) / (j - i) for i, j in pairs) * (n - 1))
    return change if abs(z) > DRIFT_Z and abs(change) > DRIFT else None
