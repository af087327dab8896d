"""Whether other work has the cores already, looked at in the moment before a run starts (launch/waiting.py)."""

from __future__ import annotations

import os
import statistics
import time

from lockstep.machine.cores import cores
from lockstep.machine.cpu import runnable

# Looks, and seconds between them: work that comes and goes within so short a time is not what cores are left to.
LOOKS, PAUSE_S = 7, 0.015
# Less than this share of the cores is what systems do by themselves.
LEAST = 0.5


def taken() -> int:
    """How many of the cores that this process may use other work has; 0 where that is less than half of them.

    Tasks that could run are counted, of the whole machine: this process has its part of the machine's cores, and of the tasks.
    """
    usable = cores()
    part = usable / max(usable, os.cpu_count() or 1)
    seen: list[int] = []
    for look in range(LOOKS):
        if look:
            time.sleep(PAUSE_S)
        found = runnable()
        if found is None or part * (found - 1) < LEAST * usable:
            return 0  # at once: on a quiet machine nobody waits for this
        seen.append(found - 1)
    return min(usable, round(part * statistics.median(seen)))
