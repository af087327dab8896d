"""What measuring costs: our step clock's work for one step, as a share of a step of document D's job; and what `--trace` costs.

Training with the clock against training without it would not answer this: one per cent is far below the noise
of an epoch. So the clock's calls are timed by the ten thousand, by themselves (`benchmarks.clock_cost`), and steps
with and without a trace by the same two ranks in turns (`benchmarks.trace_cost`).
"""

from __future__ import annotations

import sys

from benchmarks import ours
from benchmarks.processes import last_core, parse_line, run
from benchmarks.record import Measurement, Section, compare
from benchmarks.rounds import Span, interleave
from benchmarks.settings import Settings

BATCH = 32
CLOCK = "clock"
STEP = "step"
TARGET = 0.01
UNTRACED, TRACED = "two ranks, no trace", "two ranks, --trace"
TARGET_TRACED = 1.05


def measure(settings: Settings) -> Section:
    """Both per step, round by round; our own step is the hardest measure, since it is the shortest."""
    outcome = interleave(
        "instrumentation",
        {CLOCK: clock_span, STEP: lambda: step_span(settings.samples)},
        settings.repeats,
        settings.seed,
    )
    section = Section("instrumentation", "Cost of the step clock", "step", "milliseconds", outcome.measurements)
    found = compare(outcome.measurements, CLOCK, STEP, "share", "wall", TARGET)
    if found:
        section.comparisons.append(found)
    for name, reason in outcome.failures.items():
        section.refuse(f"{name} failed: {reason}")
    section.measurements += traced_spans(len(section.measurements))
    slower = compare(section.measurements, TRACED, UNTRACED, "share", "wall", TARGET_TRACED)
    if slower:
        section.comparisons.append(slower)
    section.notes.append("The step contains the clock, so its share of the rest is larger by that share squared.")
    return section


def clock_span() -> Span:
    """The clock's calls alone, in a fresh process."""
    document = parse_line(run([sys.executable, "-m", "benchmarks.clock_cost"], last_core(), threads=1))
    return Span(document["steps"], document["seconds"], document["cpu_seconds"], {})


def step_span(samples: int | None) -> Span:
    """A whole step of D's job as Lockstep trains it."""
    images = ours.train(BATCH, 1, 1, samples, last_core())
    return Span(-(-images.units // BATCH), images.wall_seconds, images.cpu_seconds, {})


def traced_spans(before: int) -> list[Measurement]:
    """Every round of `benchmarks.trace_cost`, in the order in which it was taken."""
    document = parse_line(run([sys.executable, "-m", "benchmarks.trace_cost"], None, threads=1))
    found: list[Measurement] = []
    for number, spans in enumerate(document["rounds"], 1):
        for name, seconds in spans.items():
            words = TRACED if name == "on" else UNTRACED
            # The ranks wait for each other: it is the wall clock that counts.
            found.append(Measurement(before + len(found) + 1, number, words, document["steps"], seconds, 0.0))
    return found
