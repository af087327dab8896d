"""`python -m benchmarks.noise RUNS NAME`: write tests/noise/NAME.json, the noise of this machine, from every race and study in a folder of runs.

What is kept of each pair of contenders are log ratios within rounds, by start, less their mean: whatever truly differs is taken out, and what the
machine does is left, of the size that it had (files without `starts_as_far_apart` have the starts of a pair too near to each other, by up to a
fifth, and their reader puts them apart).
tests/test_turns.py simulates races with it.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from pathlib import Path

import msgspec

from benchmarks import machine
from benchmarks.processes import ROOT
from lockstep.reading import read_records
from lockstep.turns import estimate
from lockstep.turns.estimate import Window

FEWEST_STARTS, FEWEST_ROUNDS = 3, 20
DIGITS = 5


def main(runs: Path, name: str) -> None:
    found = []
    for file in sorted(runs.glob("*/*/windows.jsonl")):
        windows = [msgspec.convert(line, Window) for line in read_records(file, Window)]
        names = list(dict.fromkeys(window.contender for window in windows))
        found += [pair for other in names[1:] if (pair := residuals(windows, other, names[0]))]
    about = {key: machine.describe()[key] for key in ("cpu", "cores", "kernel")}
    content = {"machine": about, "starts_as_far_apart": True, "pairs": found}
    path = ROOT / "tests" / "noise" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, separators=(",", ":")) + "\n")
    spreads = [statistics.stdev(statistics.fmean(rounds) for rounds in pair) for pair in found]
    within = [
        statistics.stdev(value - statistics.fmean(rounds) for rounds in pair for value in rounds) for pair in found
    ]
    print(
        f"{len(found)} pairs; starts differ by {statistics.median(spreads):.2%}, rounds of one by {statistics.median(within):.2%}"
    )


def residuals(windows: list[Window], contender: str, baseline: str) -> list[list[float]]:
    starts = [rounds for rounds in estimate.by_start(windows, contender, baseline) if len(rounds) >= FEWEST_ROUNDS]
    if len(starts) < FEWEST_STARTS:
        return []
    middles = [estimate.middle_mean(rounds) for rounds in starts]
    middle = statistics.fmean(middles)
    # Starts are nearer to their own mean than to the truth, which nobody knows: of three, a third of their variance is lost.
    wider = math.sqrt(len(starts) / (len(starts) - 1))
    return [
        [round(value - own + wider * (own - middle), DIGITS) for value in rounds]
        for rounds, own in zip(starts, middles, strict=True)
    ]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
