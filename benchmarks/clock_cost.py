"""Times the calls that the training loop makes for measuring, and nothing else. Prints one line of JSON.

`one_step` has to mirror the training loop: where that calls the clock differently, change it here.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import torch

from lockstep.measure.clock import DATA, EXCHANGE, FORWARD, OPTIMIZER, CpuClock
from lockstep.measure.records import StepLog

STEPS = 20_000
WARM_UP = 1_000


def one_step(clock: CpuClock) -> None:
    """A step of a rank that exchanges gradients: the case with the most calls."""
    clock.start()
    clock.lap(DATA)
    clock.lap(FORWARD)
    clock.skip()
    clock.lap(FORWARD)
    clock.gradients_ready()
    clock.lap_backward(True)
    clock.gradients_ready()
    clock.lap(EXCHANGE)
    clock.skip()
    clock.lap(OPTIMIZER)
    clock.finish(1, 32)


def main() -> None:
    """Time many steps; the rows go to a real file, since writing them is part of the cost."""
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        log = StepLog(Path(folder) / "steps.bin", WARM_UP + STEPS, torch.device("cpu"))
        clock = CpuClock(log)
        for _ in range(WARM_UP):
            one_step(clock)
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(STEPS):
            one_step(clock)
        seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
        log.close()
    print(json.dumps({"steps": STEPS, "seconds": seconds, "cpu_seconds": cpu_seconds}))


if __name__ == "__main__":
    main()
