"""What measuring costs: our step clock's work for one step, as a share of a step of document D's job.

Training with the clock against training without it would not answer this: one per cent is far below the noise
of an epoch. So the clock's calls are timed by the ten thousand, by themselves (`benchmarks.clock_cost`).
"""

from __future__ import annotations

import sys

from benchmarks import ours
from benchmarks.processes import last_core, parse_line, run
from benchmarks.record import Section, compare
from benchmarks.rounds import Span, interleave
from benchmarks.settings import Settings

BATCH = 32
CLOCK = "clock"
STEP = "step"
TARGET = 0.01


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
