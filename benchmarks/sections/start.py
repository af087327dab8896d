"""How long `lockstep --help` takes beyond starting Python: what a person waits for at every command."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Sequence
from functools import partial

from benchmarks import ours
from benchmarks.processes import run
from benchmarks.record import Section, compare
from benchmarks.rounds import Span, interleave
from benchmarks.settings import Settings

HELP = "lockstep --help"
PYTHON = "python -c pass"
TARGET_MS = 150.0
REPEATS = 20


def measure(settings: Settings) -> Section:
    """Twenty interleaved pairs (three in a quick trial): a start is short, so its noise is large."""
    contenders = {
        HELP: partial(start, [ours.executable(), "--help"]),
        PYTHON: partial(start, [sys.executable, "-c", "pass"]),
    }
    for warm in contenders.values():  # the first start compiles modules and reads them from the disk
        warm()
    outcome = interleave("start", contenders, 3 if settings.quick else REPEATS, settings.seed)
    section = Section("start", "Start of the command line", "start", "milliseconds", outcome.measurements)
    found = compare(outcome.measurements, HELP, PYTHON, "difference", "wall", TARGET_MS)
    if found:
        section.comparisons.append(found)
    for name, reason in outcome.failures.items():
        section.refuse(f"{name} failed: {reason}")
    return section


def start(command: Sequence[str]) -> Span:
    """From before the process exists until it is gone."""
    cpu, wall = children_cpu(), time.perf_counter()
    run(command)
    return Span(1, time.perf_counter() - wall, children_cpu() - cpu, {})


def children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
