"""One execution: plant a cause of one size, run, explain, and judge what was named first and how large it is said to be."""

from __future__ import annotations

import json
import statistics
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import ours
from benchmarks.planted.causes import HERE, NOTHING, RECIPE, SIZES, TWO, Cause
from benchmarks.planted.plants import TURN_STEPS
from benchmarks.processes import run
from lockstep.measure.view import RunView
from lockstep.settings import load
from lockstep.turns import Budget, Race, Ranks

RACE_S, MEASURE_S = 40.0, 8.0
# Steps after a change of turns that still have something of the turn before.
SETTLE = 1


def executed(cause: Cause, size: float) -> dict[str, Any]:
    """What came out, in plain words and numbers."""
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        runs = Path(folder)
        if cause.words:
            words = cause.words[SIZES.index(size)]
            run([ours.executable(), "run", *RECIPE, *words, "--runs", folder, "--name", "planted"])
        else:
            _loop(cause, size, runs, "planted")
        more = ["--measure", "--seconds", str(MEASURE_S)] if cause.measured else []
        told = run([ours.executable(), "explain", "planted", "--runs", folder, *more, "--json"])
        findings = [each for each in json.loads(told)["findings"] if each["cause"] and each["cost"] > 0]
        true = _true(cause, size, runs)
    first = findings[0] if findings else {"cause": "", "cost": 0.0, "interval": None, "verdict": ""}
    mine = next((each for each in findings if each["cause"] in cause.named), None)
    return {
        "cause": cause.name,
        "planted": size,
        "true": true,
        "first": first["cause"],
        "named_first": first["cause"] in cause.named,
        "stated": mine["cost"] if mine else None,
        "interval": mine["interval"] if mine else None,
        "verdict": first["verdict"],
        "named": {each["cause"]: round(each["cost"], 4) for each in findings},
    }


def _loop(cause: Cause, size: float, runs: Path, name: str, turns: bool = False) -> None:
    script = ["--cause", cause.name, "--size", str(size), "--step", str(step_seconds()), "--out", str(runs)]
    argv = [ours.executable(), "run", str(HERE / "loop.py"), *cause.placement, "--runs", str(runs), "--name", name]
    run([*argv, "--", *script, *(["--turns"] if turns else [])])


@cache
def step_seconds() -> float:
    """A step of the loop with nothing planted, which sizes are shares of; once is enough, since the true sizes are measured."""
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        argv = [ours.executable(), "run", str(HERE / "loop.py"), *TWO, "--runs", folder, "--name", "plain"]
        run([*argv, "--", "--cause", NOTHING.name, "--out", folder])
        return float(np.median(_steps(Path(folder) / "plain")))


def _steps(folder: Path) -> Any:
    """Seconds of each step after warm-up, of its slowest rank."""
    return np.max([rows["total_ns"] for rows in RunView(folder).after_warmup()], axis=0) / 1e9


def _true(cause: Cause, size: float, runs: Path) -> float:
    """The share of the training time that is saved without the cause."""
    if cause.truth == "race":
        return _raced(cause, size)
    if cause.truth == "turns":
        _loop(cause, size, runs, "turns", turns=True)
        return _in_turns(runs / "turns", runs)
    spent = [json.loads(path.read_text())["spent"] for path in sorted(runs.glob("planted-*.json"))]
    epochs = RunView(runs / "planted").epochs()
    whole = sum(float(epoch["train_seconds"]) + float(epoch["eval_seconds"]) for epoch in epochs)
    return max(spent) / whole


def _in_turns(folder: Path, out: Path) -> float:
    """Each turn with the cause beside the turn before it, which is without it."""
    on = json.loads((out / "planted-1.json").read_text())["on"]
    steps = np.max([rows["total_ns"] for rows in RunView(folder).all_steps()], axis=0) / 1e9
    turns = [
        float(steps[first + SETTLE : first + TURN_STEPS].mean())
        for first in range(2 * TURN_STEPS, len(on) - TURN_STEPS + 1, TURN_STEPS)
    ]
    assert not on[2 * TURN_STEPS]
    return statistics.median(1 - off / with_it for off, with_it in zip(turns[::2], turns[1::2], strict=False))


@cache
def _raced(cause: Cause, size: float) -> float:
    """Both placements alive at the same time, in turns: once for each size, whatever the number of repeats."""
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        words = cause.words[SIZES.index(size)]
        ways = {"without": (*words, *cause.without), "with": words}
        racing = [Ranks(name, *load([], [*RECIPE, *words]), Path(folder) / name) for name, words in ways.items()]
        race = Race(racing, Budget(seconds=RACE_S))
        race.run()
        (ratio,) = race.ratios()
        return 1 - 1 / ratio.effect
