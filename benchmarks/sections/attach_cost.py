"""What `lockstep attach` costs: the same script alone and attached, both alive, in turns; a step is a line that both print.

Starts are the unit of the interval, as in every race: one start differs from another by more than the hooks cost. What the hooks say of
themselves stands beside it.
"""

from __future__ import annotations

import math
import sys
import tempfile
from functools import partial
from typing import Any

from benchmarks import ours, parts
from benchmarks.attached.launch import THREADS, Attached, command
from benchmarks.record import Comparison, Measurement, Section
from benchmarks.settings import Settings
from lockstep.errors import LockstepError
from lockstep.turns import Budget, Race
from lockstep.turns.command import Command
from lockstep.turns.estimate import Ratio

TARGET = 1.01
SECONDS, QUICK_S = 480.0, 120.0
MARGIN = 0.005
KINDS = (("plain", 1), ("plain", 2), ("Lightning", 1))
# More than a race ever asks for.
ENDLESS = 10_000_000


def measure(settings: Settings) -> Section:
    """A share of 100.5 % means that an attached step takes 0.5 % longer."""
    section = Section("attach-cost", "Steps of a script, attached and alone, in turns", "step", "milliseconds", [])
    for kind, ranks in KINDS:
        name = f"{kind}, {ranks} rank{'s' if ranks > 1 else ''}"
        found = parts.kept("attach-cost", name, partial(_raced, kind, ranks, QUICK_S if settings.quick else SECONDS))
        if found["failed"]:
            section.refuse(f"{name}: {found['failed']}")
            continue
        for window in found["windows"]:
            order = len(section.measurements) + 1
            contender = f"{name}, {window['contender']}"
            number = 1000 * window["start"] + window["round"]
            section.measurements.append(
                Measurement(order, number, contender, window["steps"], window["wall"], window["cpu"])
            )
        for clock in ("wall", "cpu"):
            ratio = found[clock]
            bounds = None if ratio["low"] is None else (ratio["low"], ratio["high"])
            section.comparisons.append(
                Comparison(
                    f"{name}, attached",
                    f"{name}, alone",
                    "share",
                    clock,
                    found["starts"][clock],
                    ratio["effect"],
                    bounds,
                    TARGET,
                )
            )
        said = found["said"]
        section.notes.append(
            f"{name}: {found['wall']['verdict']} within {MARGIN:.1%} after {found['wall']['n']} starts; by the hooks' own account they take "
            f"{1e6 * said['seconds']:.0f} µs of a step of {1e3 * said['step']:.3g} ms ({said['seconds'] / said['step']:.2%})."
        )
    return section


def _raced(kind: str, ranks: int, seconds: float) -> dict[str, Any]:
    variables = [f"{name}={value}" for name, value in {**THREADS, "LINES": "1", "PYTHONWARNINGS": "ignore"}.items()]
    words = command(kind, ranks, ENDLESS)
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as runs:
        contenders = [
            Command("alone", ["env", *variables, *words]),
            Command("attached", ["env", *variables, ours.executable(), "attach", "--runs", runs, "--", *words]),
        ]
        race = Race(contenders, Budget(seconds=seconds, margin=MARGIN))
        try:
            race.run()
        except LockstepError as error:  # its budget was spent before the first round
            return {"failed": str(error)}
    if race.failures or not race.ratios():
        return {"failed": "; ".join(race.failures.values()) or "nothing could be compared"}
    wall, cpu = race.ratios()[0], race.ratios("cpu")[0]
    print(f"[attach-cost] {kind}, {ranks}: {wall.effect} ({wall.low} to {wall.high})", file=sys.stderr, flush=True)
    with Attached(kind, ranks) as seen:
        said = seen.cost
    return {
        "failed": "",
        "wall": _plain(wall),
        "cpu": _plain(cpu),
        "starts": {clock: _by_start(race, clock) for clock in ("wall", "cpu")},
        "windows": [
            {name: getattr(window, name) for name in ("contender", "start", "round", "steps", "wall", "cpu")}
            for window in race.windows
        ],
        "said": said,
    }


def _plain(ratio: Ratio) -> dict[str, Any]:
    return {name: getattr(ratio, name) for name in ("effect", "low", "high", "n", "verdict")}


def _by_start(race: Race, clock: str) -> list[float]:
    """The ratio of the two within each start: the mean of its rounds' logarithms."""
    found: dict[int, dict[int, dict[str, float]]] = {}
    for window in race.windows:
        seconds = window.wall if clock == "wall" else window.cpu
        if seconds > 0:
            found.setdefault(window.start, {}).setdefault(window.round, {})[window.contender] = seconds / window.steps
    rounds = {
        start: [math.log(both["attached"] / both["alone"]) for both in each.values() if len(both) == 2]
        for start, each in found.items()
    }
    return [math.exp(sum(values) / len(values)) for values in rounds.values() if values]
