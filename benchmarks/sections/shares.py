"""Unequal ranks: what `shares=auto` makes of two ranks, one of which has its processor for half of the time.

Both alone give what there is to be had: the sum of their speeds. Equal shares go at the pace of the slower one.
"""

from __future__ import annotations

import json
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import ours, stats
from benchmarks.processes import run
from benchmarks.record import Section
from benchmarks.rounds import Contender, Span, interleave
from benchmarks.settings import Settings
from benchmarks.throttle import throttled

RECIPE = ("data=mnist", "train_limit=12000", "test_limit=500", "global_batch=256", "threads=1", "epochs=6")
ALONE, SLOW, EQUAL, AUTO = "one rank", "one rank, throttled", "equal shares", "shares=auto"
WAYS: dict[str, tuple[tuple[str, ...], int | None]] = {
    ALONE: (("ranks=1", "global_batch=128"), None),
    SLOW: (("ranks=1", "global_batch=128"), 0),
    EQUAL: (("ranks=2", "backend=gloo"), 1),
    AUTO: (("ranks=2", "backend=gloo", "shares=auto"), 1),
}
GOAL = 0.9


def measure(settings: Settings) -> Section:
    contenders: dict[str, Contender] = {name: partial(_trained, *way) for name, way in WAYS.items()}
    outcome = interleave("shares", contenders, settings.repeats, settings.seed)
    title = "Two ranks of which one has its processor for half of the time: images a second"
    section = Section("shares", title, "images", "rate", outcome.measurements)
    for name, reason in outcome.failures.items():
        section.refuse(f"{name} failed: {reason}")
    shares: dict[str, list[float]] = {EQUAL: [], AUTO: []}
    for number in range(1, settings.repeats + 1):
        speed = {one.contender: one.details["speed"] for one in section.measurements if one.round == number}
        if len(speed) < len(WAYS):
            continue
        for name, found in shares.items():
            found.append(speed[name] / (speed[ALONE] + speed[SLOW]))
    for name, found in shares.items():
        if found:
            each = ", ".join(f"{share:.0%}" for share in found)
            goal = f" (goal {GOAL:.0%}: {'met' if stats.median(found) >= GOAL else 'missed'})" if name == AUTO else ""
            section.notes.append(f"{name}: {stats.median(found):.0%} of the summed speed of both alone{goal}: {each}.")
    divided = [str(one.details["shares"]) for one in section.measurements if one.contender == AUTO]
    section.notes.append(f"In the end 256 samples were divided as {'; '.join(divided)}.")
    return section


def _trained(words: tuple[str, ...], slow: int | None) -> Span:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        argv = [ours.executable(), "run", *RECIPE, *words, "--runs", folder, "--name", "one", "--json"]
        printed = run(argv, None, None) if slow is None else throttled(argv, Path(folder) / "one", slow)
        shown = json.loads(run([ours.executable(), "show", "one", "--runs", folder, "--json"], None, None))
    document: dict[str, Any] = json.loads(printed)
    # The first third is for finding the shares; the rate of an epoch is that of its training alone.
    epochs = shown["epochs"][len(shown["epochs"]) // 3 :]
    speed = stats.median([float(epoch["images_per_second"]) for epoch in epochs])
    details = {"speed": speed, "shares": document.get("shares")}
    return Span(1, time.perf_counter() - began, float(document["train_cpu_seconds"]), details)
