"""Unequal ranks: what `shares=auto` makes of two ranks, one of which has its processor for half of the time.

Both alone give what there is to be had: the sum of their speeds. Equal shares go at the pace of the slower one.
"""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import ours, stats
from benchmarks.processes import run
from benchmarks.record import Section
from benchmarks.rounds import Contender, Span, interleave
from benchmarks.settings import Settings
from benchmarks.throttle import throttled

RECIPE = ("data=mnist", "train_limit=12000", "test_limit=500", "global_batch=256", "threads=1", "epochs=10")
ALONE, SLOW = "one rank", "one rank, throttled"
GLOO, SHM = ("ranks=2", "backend=gloo", "strategy=ddp"), ("ranks=2", "backend=shm", "strategy=flat")
WAYS: dict[str, tuple[tuple[str, ...], int | None]] = {
    ALONE: (("ranks=1", "global_batch=128"), None),
    SLOW: (("ranks=1", "global_batch=128"), 0),
    "gloo, equal shares": (GLOO, 1),
    "gloo, shares=auto": ((*GLOO, "shares=auto"), 1),
    "shm, equal shares": (SHM, 1),
    "shm, shares=auto": ((*SHM, "shares=auto"), 1),
}
GOAL = 0.9


def measure(settings: Settings) -> Section:
    contenders: dict[str, Contender] = {name: partial(_trained, *way) for name, way in WAYS.items()}
    outcome = interleave("shares", contenders, settings.repeats, settings.seed)
    title = "Two ranks of which one has its processor for half of the time: images a second"
    section = Section("shares", title, "images", "rate", outcome.measurements)
    for name, reason in outcome.failures.items():
        section.refuse(f"{name} failed: {reason}")
    for name in list(WAYS)[2:]:
        found, divided = [], []
        for number in range(1, settings.repeats + 1):
            in_round = {one.contender: one.details for one in section.measurements if one.round == number}
            if {name, ALONE, SLOW} <= in_round.keys():
                found.append(in_round[name]["speed"] / (in_round[ALONE]["speed"] + in_round[SLOW]["speed"]))
                divided.append(str(in_round[name]["shares"]))
        if found:
            each = ", ".join(f"{share:.0%}" for share in found)
            auto = "auto" in name
            goal = f" (goal {GOAL:.0%}: {'met' if stats.median(found) >= GOAL else 'missed'})" if auto else ""
            ends = f"; in the end 256 samples were divided as {', '.join(divided)}" if auto else ""
            section.notes.append(
                f"{name}: {stats.median(found):.0%} of the summed speed of both alone{goal}: {each}{ends}."
            )
    return section


def _trained(words: tuple[str, ...], slow: int | None) -> Span:
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        argv = [ours.executable(), "run", *RECIPE, *words, "--runs", folder, "--name", "one", "--json"]
        printed = run(argv, None, None) if slow is None else throttled(argv, Path(folder) / "one", slow)
        shown = json.loads(run([ours.executable(), "show", "one", "--runs", folder, "--json"], None, None))
    document: dict[str, Any] = json.loads(printed)
    # The first half is for finding the shares; the rate of an epoch is that of its training alone.
    epochs = shown["epochs"][len(shown["epochs"]) // 2 :]
    speed = stats.median([float(epoch["images_per_second"]) for epoch in epochs])
    details = {"speed": speed, "shares": document.get("shares")}
    images = int(document["train_images"])
    return Span(images, images / speed, float(document["train_cpu_seconds"]), details)
