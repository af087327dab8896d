"""The fused convolution + ReLU (+ max-pool) against PyTorch's operators: single layers, training steps, inference.

Within a group everything runs in one process and in turns, on the same numbers, and must give the same results. "eager" is what people
write: Conv2d, ReLU, MaxPool2d. One thread is judged by its CPU time, more by the wall clock. ONNX Runtime and `lockstep run` are processes
of their own; the former is left out where it is not installed (LOCKSTEP_BENCH_ONNX may name another interpreter that has it).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from benchmarks import ours
from benchmarks.environment import VENV
from benchmarks.kernel_turns import (
    ANSWER,
    ANSWER_BATCH,
    CIFAR,
    COMPILED,
    EAGER,
    FUSED,
    LAST,
    LAYERS,
    ONNX,
    STEP,
    STEP_BATCHES,
    named_as,
)
from benchmarks.processes import last_core, parse_line, run
from benchmarks.record import Clock, Measurement, Section, compare
from benchmarks.rounds import Span, interleave
from benchmarks.settings import Settings
from benchmarks.stats import relative_spread

# How far results, gradients or losses may be from eager's: where an output of a million is within rounding of 0, the ReLU may cut it off or
# not, and the gradients that depend on it differ.
TOLERANCE = 1e-2


def measure(settings: Settings) -> Section:
    """Four groups, inference, and Lockstep's own loop with and without `fused=true`."""
    title = "Fused convolution + ReLU (+ max-pool) against PyTorch's operators"
    section = Section("kernels", title, "call", "milliseconds", [])
    rounds = 2 if settings.quick else 2 * settings.repeats - 1
    for group, threads in ((LAYERS, 1), (STEP, 1), (CIFAR, 1), (CIFAR, 2)):
        if threads <= len(os.sched_getaffinity(0)):
            add_group(section, group, threads, rounds)
    contenders = {words: partial(answer_span, words) for words in (EAGER, LAST, FUSED)}
    python = onnx_python()
    if python:
        contenders[ONNX] = partial(answer_span, ONNX, python)
    else:
        section.notes.append("ONNX Runtime is not installed: not measured.")
    named = {named_as(f"D inference, batch {ANSWER_BATCH}", name): call for name, call in contenders.items()}
    for batch in STEP_BATCHES:
        for word in ("false", "true"):
            call = partial(ours.train, batch, 1, 1, settings.samples or 19_200, last_core(), (f"fused={word}",))
            named[named_as(f"lockstep run, images, batch {batch}", f"fused={word}")] = call
    outcome = interleave("kernels", named, settings.repeats, settings.seed)
    for name, reason in outcome.failures.items():
        section.refuse(f"{name} failed: {reason}")
    check_losses(section, outcome.measurements)
    append(section, outcome.measurements)
    compare_all(section)
    return section


def check_losses(section: Section, measurements: Iterable[Measurement]) -> None:
    """`lockstep run` has to have learnt the same with and without `fused=true`."""
    losses: dict[str, list[float]] = {}
    for one in measurements:
        if "loss" in one.details:
            losses.setdefault(one.contender.rpartition(": ")[0], []).append(one.details["loss"])
    for what, values in losses.items():
        spread = relative_spread(values)
        section.notes.append(f"{what}: training losses differ by {spread:.1e} of the smallest at most.")
        if not spread <= TOLERANCE:
            section.refuse(f"{what}: losses differ by {spread:.1e}, more than {TOLERANCE}")


def append(section: Section, measurements: Iterable[Measurement]) -> None:
    for one in measurements:
        number = len(section.measurements) + 1
        section.measurements.append(
            Measurement(number, one.round, one.contender, one.units, one.wall_seconds, one.cpu_seconds)
        )


def add_group(section: Section, group: str, threads: int, rounds: int) -> None:
    print(f"[kernels] {group}, {threads} thread(s)", file=sys.stderr, flush=True)
    words = process(group, str(threads), str(rounds))
    document = parse_line(run(words, last_core() if threads == 1 else None, threads))
    found = [
        Measurement(0, number, name, *spent)
        for number, spans in enumerate(document["rounds"], 1)
        for name, spent in spans.items()
    ]
    append(section, found)
    worst = max(document["errors"].values())
    section.notes.append(
        f"{group}, {threads} thread(s): results and gradients differ from eager's by {worst:.1e} at most."
    )
    for name, error in document["errors"].items():
        if not error <= TOLERANCE:
            section.refuse(f"{name} differs from eager by {error:.1e}, more than {TOLERANCE}")


def process(*words: str, python: str = sys.executable) -> list[str]:
    from lockstep.process import KEEP_MEMORY  # what Lockstep sets for its ranks, here for everyone

    settings = [f"{key}={value}" for key, value in KEEP_MEMORY.items()]
    return ["env", *settings, python, "-m", "benchmarks.kernel_turns", *words]


def answer_span(name: str, python: str = sys.executable) -> Span:
    document = parse_line(run(process(ANSWER, name, python=python), last_core(), threads=1))
    return Span(document["calls"], document["seconds"], document["cpu_seconds"], {})


def onnx_python() -> str | None:
    for python in (os.environ.get("LOCKSTEP_BENCH_ONNX"), sys.executable, str(VENV / "bin" / "python")):
        if python and Path(python).exists():
            found = subprocess.run([python, "-c", "import onnx, onnxruntime"], capture_output=True)
            if found.returncode == 0:
                return python
    return None


def target_of(what: str, theirs: str) -> float | None:
    """What the project set out to reach, by the name of what is computed."""
    if what.startswith("D step"):
        return {"D step, batch 32": 3.5, "D step, batch 256": 5.0}[what] if theirs == EAGER else None
    if what.startswith("D inference"):
        return {EAGER: 5.0, ONNX: 1.0}.get(theirs)
    if what.startswith("CIFAR"):
        return {EAGER: 2.5, COMPILED: 1.6}.get(theirs)
    if what.endswith("batch 1 forward") or what.endswith("batch 1 backward"):
        return 0.97 if theirs == EAGER else None
    if theirs == LAST:
        return 1.0
    return 1.2 if what.startswith("3→32") and what.endswith("backward") else 2.0


def compare_all(section: Section) -> None:
    """Ours against everyone else who computed the same."""
    names = list(dict.fromkeys(one.contender for one in section.measurements))
    for name in names:
        what, _, who = name.rpartition(": ")
        mine = named_as(what, "fused=true" if who.startswith("fused=") else FUSED)
        if name == mine or mine not in names:
            continue
        clock: Clock = "wall" if what.endswith("2 threads") or what.startswith("lockstep run") else "cpu"
        target = None if what.startswith("lockstep run") else target_of(what, who)
        found = compare(section.measurements, mine, name, "speed", clock, target)
        if found:
            section.comparisons.append(found)
