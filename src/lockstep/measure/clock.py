"""The step clock: where the time of one step went, at a cost of about a microsecond per step.

On a CPU it reads `perf_counter_ns`. On a GPU it records device events, which are read later, when they are over anyway.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from time import perf_counter_ns
from typing import Any, Protocol

from lockstep.measure.records import PHASES, StepLog

DATA, FORWARD, BACKWARD, EXCHANGE, OPTIMIZER = range(len(PHASES))


class StepClock(Protocol):
    """Laps within a step. Laps of the same phase add up, so accumulation needs nothing special."""

    def start(self) -> None: ...
    def lap(self, phase: int) -> None: ...
    def skip(self) -> None:
        """Time since the last lap belongs to no phase: it is shown as "other"."""

    def gradients_ready(self) -> None:
        """The last gradient is computed: what follows until the end of backward is exposed exchange."""

    def lap_backward(self, exchanged: bool) -> None: ...
    def waits(self) -> bool:
        """Whether the step is waiting for the exchange now; another thread asks, to find the rank that holds up the others."""

    def finish(self, epoch: int, samples: int) -> None: ...
    def flush(self) -> None: ...


class CpuClock:
    """Host time; the device is the host."""

    def __init__(self, log: StepLog) -> None:
        self._log = log
        self._begin = self._last = self._ready = 0
        self._phases = [0] * len(PHASES)

    def start(self) -> None:
        self._phases = [0] * len(PHASES)
        self._begin = self._last = perf_counter_ns()

    def lap(self, phase: int) -> None:
        now = perf_counter_ns()
        self._phases[phase] += now - self._last
        self._last = now

    def skip(self) -> None:
        self._last = perf_counter_ns()

    def gradients_ready(self) -> None:
        self._ready = perf_counter_ns()

    def lap_backward(self, exchanged: bool) -> None:
        now = perf_counter_ns()
        ready = self._ready if exchanged and self._ready > self._last else now
        self._phases[BACKWARD] += ready - self._last
        self._phases[EXCHANGE] += now - ready
        self._last = now

    def waits(self) -> bool:
        return self._ready > self._last

    def finish(self, epoch: int, samples: int) -> None:
        self._log.write(epoch, samples, self._begin, self._phases, perf_counter_ns() - self._begin)

    def flush(self) -> None:
        self._log.flush()


class CudaClock:
    """Device time by events on the compute stream. Not yet run on a GPU: see docs/training.md."""

    def __init__(self, log: StepLog) -> None:
        import torch

        self._event: Any = partial(torch.cuda.Event, enable_timing=True)
        self._log = log
        self._marks: list[tuple[int, Any]] = []
        self._ready: Any = None
        self._start_ns = 0
        self._pending: list[tuple[int, int, int, list[tuple[int, Any]]]] = []

    def _mark(self, phase: int, event: Any = None) -> None:
        if event is None:
            event = self._event()
            event.record()
        self._marks.append((phase, event))

    def start(self) -> None:
        self._start_ns = perf_counter_ns()
        self._marks = []
        self._mark(-1)

    def lap(self, phase: int) -> None:
        self._mark(phase)

    def skip(self) -> None:
        self._mark(-1)

    def gradients_ready(self) -> None:
        self._ready = self._event()
        self._ready.record()

    def lap_backward(self, exchanged: bool) -> None:
        if exchanged and self._ready is not None:
            self._mark(BACKWARD, self._ready)
            self._mark(EXCHANGE)
        else:
            self._mark(BACKWARD)
        self._ready = None

    def waits(self) -> bool:
        return self._ready is not None

    def finish(self, epoch: int, samples: int) -> None:
        self._mark(-1)
        self._pending.append((epoch, samples, self._start_ns, self._marks))

    def flush(self) -> None:
        """Read the events of all finished steps; waits for the newest one, so it is called about twice a second."""
        if self._pending:
            self._pending[-1][3][-1][1].synchronize()
        for epoch, samples, start_ns, marks in self._pending:
            phases = [0] * len(PHASES)
            for (_, before), (phase, event) in pairwise(marks):
                if phase >= 0:
                    phases[phase] += round(before.elapsed_time(event) * 1e6)
            self._log.write(epoch, samples, start_ns, phases, round(marks[0][1].elapsed_time(marks[-1][1]) * 1e6))
        self._pending = []
        self._log.flush()
