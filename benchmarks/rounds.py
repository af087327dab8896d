"""Executions of contenders in rounds (lockstep/rounds.py), with progress; one that fails is left out of later rounds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.processes import ContenderFailed
from benchmarks.record import Measurement
from lockstep.rounds import rounds


@dataclass(frozen=True)
class Span:
    """What one execution of a contender reports: units of work, wall and CPU seconds over the same span."""

    units: int
    wall_seconds: float
    cpu_seconds: float
    details: dict[str, Any]


Contender = Callable[[], Span]


@dataclass(frozen=True)
class Outcome:
    """The measurements in the order they were made, and why a contender dropped out, by name."""

    measurements: list[Measurement]
    failures: dict[str, str]


def interleave(title: str, contenders: Mapping[str, Contender], count: int, seed: int = 0) -> Outcome:
    """Run the rounds. A contender that fails is left out of later rounds; the rest is still worth having."""
    measurements: list[Measurement] = []
    failures: dict[str, str] = {}
    progress = Progress(title, list(contenders), count)
    for number, order in enumerate(rounds(list(contenders), count, seed=seed), 1):
        for name in order:
            if name in failures:
                continue
            began = time.perf_counter()
            try:
                span = contenders[name]()
            except ContenderFailed as error:
                failures[name] = str(error)
                progress.failed(name, str(error))
                continue
            measurements.append(
                Measurement(
                    len(measurements) + 1,
                    number,
                    name,
                    span.units,
                    span.wall_seconds,
                    span.cpu_seconds,
                    span.details,
                )
            )
            progress.done(number, name, span, time.perf_counter() - began)
    return Outcome(measurements, failures)


class Progress:
    """Lines on stderr with the time left, estimated from what each contender took so far."""

    def __init__(self, title: str, names: list[str], rounds: int) -> None:
        self.title = title
        self.rounds = rounds
        self.left = dict.fromkeys(names, rounds)
        self.took: dict[str, list[float]] = {}
        self.quiet_until = 0.0

    def done(self, number: int, name: str, span: Span, seconds: float) -> None:
        self.left[name] -= 1
        self.took.setdefault(name, []).append(seconds)
        # Short executions would flood the terminal: one line a second is enough; the last one always shows.
        now = time.monotonic()
        if now >= self.quiet_until or not any(self.left.values()):
            self.quiet_until = now + 1
            rate = span.units / span.wall_seconds
            self._say(f"round {number}/{self.rounds}  {name}: {rate:,.0f}/s; {self._time_left()}")

    def failed(self, name: str, reason: str) -> None:
        self.left[name] = 0
        self._say(f"{name} failed and is left out: {reason}")

    def _time_left(self) -> str:
        seen = [seconds for all_of_one in self.took.values() for seconds in all_of_one]
        typical = sum(seen) / len(seen)
        means = {name: sum(values) / len(values) for name, values in self.took.items()}
        seconds = sum(count * means.get(name, typical) for name, count in self.left.items())
        return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"

    def _say(self, text: str) -> None:
        print(f"[{self.title}] {text}", file=sys.stderr, flush=True)
