"""Planted causes: does `lockstep explain` name each one first, and how much of the loss does its split explain?

A rank that is stopped half of the time, a slow link, a slow loader, a tiny batch, more threads than cores. Each is really planted into a
real run, which is then explained with `--measure`.
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

RECIPE = ("data=mnist", "train_limit=6000", "test_limit=500", "backend=gloo", "epochs=2")
TINY = "from torch import nn\n\n\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))\n"
LOADER = (
    "model=tiny.py:net",
    "augment.rotation=20",
    "augment.crop=3",
    "augment.jitter=0.3",
    "global_batch=256",
    "threads=1",
)
PLANTED: dict[str, tuple[str, ...]] = {
    "slow rank": ("ranks=2", "threads=1", "global_batch=256", "epochs=12"),
    "slow link": ("ranks=2", "threads=1", "global_batch=64", "hosts=emulated:2", "link=20mbit,5ms", "max_steps=60"),
    "slow loader": LOADER,
    "tiny batch": ("ranks=2", "threads=1", "global_batch=2", "backend=shm", "max_steps=300"),
    "too many threads": ("ranks=2", "threads=4", "global_batch=256"),
    "nothing": ("ranks=2", "threads=1", "global_batch=256"),
}
EXPECTED = {
    "slow rank": ("straggler", None),
    "slow link": ("speed-up", "exchange"),
    "slow loader": ("limits", "loader"),
    "tiny batch": ("limits", "batch"),
    "too many threads": ("limits", "threads"),
}


def measure(settings: Settings) -> Section:
    contenders: dict[str, Contender] = {name: partial(_explained, name, words) for name, words in PLANTED.items()}
    outcome = interleave("explain", contenders, settings.repeats, settings.seed)
    section = Section(
        "explain", "Planted causes, as `lockstep explain --measure` sees them", "runs", "rate", outcome.measurements
    )
    for name, reason in outcome.failures.items():
        section.refuse(f"{name} failed: {reason}")
    for name in PLANTED:
        mine = [one.details for one in section.measurements if one.contender == name]
        if not mine:
            continue
        first = sum(one["first"] for one in mine)
        told = "" if name not in EXPECTED else f"first verdict in {first:.0f} of {len(mine)}; "
        shares = [one["timed"] for one in mine if one["timed"] >= 0]
        split = (
            f"of what a step of all ranks takes longer than one apart, clocks within it saw {stats.median(shares):.0%} ({min(shares):.0%} to {max(shares):.0%})"
            if shares
            else "one rank: no split"
        )
        adds = max(one["phases_off"] for one in mine)
        section.notes.append(f"{name}: {told}{split}; phases and step differ by {adds:.2%} at most.")
    return section


def _explained(name: str, words: tuple[str, ...]) -> Span:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        (Path(folder) / "tiny.py").write_text(TINY)
        argv = [ours.executable(), "run", *RECIPE, *words, "--runs", folder, "--name", "planted", "--json"]
        argv = [word.replace("tiny.py", f"{folder}/tiny.py") for word in argv]
        document = json.loads(
            throttled(argv, Path(folder) / "planted", 1) if name == "slow rank" else run(argv, None, None)
        )
        found = json.loads(
            run([ours.executable(), "explain", "planted", "--runs", folder, "--measure", "--json"], None, None)
        )
    details = _judge(name, found["findings"])
    return Span(1, time.perf_counter() - began, float(document["train_cpu_seconds"]), details)


def _judge(name: str, findings: list[dict[str, Any]]) -> dict[str, float]:
    question, cause = EXPECTED.get(name, ("", None))
    first = findings[0]
    named = first["figures"].get("cause") or next(iter(first["figures"].get("largest") or []), None)
    same = first["question"] == question or (question == "limits" and first["question"] == "speed-up")
    speed = next((each for each in findings if "beyond_apart_s" in each["figures"]), None)
    parts = next(each["figures"] for each in findings if each["question"] == "step" and "ranks" in each["figures"])[
        "ranks"
    ]
    off = max(abs(part["other"]) / part["total"] for part in parts)
    return {
        "first": float(same and cause in (None, named)),
        "timed": _timed(speed["figures"]) if speed else -1.0,
        "phases_off": off,
    }


def _timed(figures: dict[str, Any]) -> float:
    """What the clocks within a step say of exchange and waiting, beside what a step of all ranks takes longer than one apart."""
    seen, beyond = figures["parts_s"]["exchange"] + figures["parts_s"]["waiting"], figures["beyond_apart_s"]
    return max(0.0, seen / beyond) if beyond > 0 else -1.0
