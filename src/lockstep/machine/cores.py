"""How many cores there are for this process, and how much of their time it is really given: measured with busy threads on every one."""

from __future__ import annotations

import hashlib
import math
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from lockstep.machine.cpu import ticks
from lockstep.machine.quota import ROOT, cpu_quota


def cores(root: Path = ROOT) -> int:
    """Cores this process may use: what a container or taskset left us, not what the machine has. A quota counts rounded up."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    quota = cpu_quota(root)
    return allowed if quota is None else min(allowed, math.ceil(quota))


@dataclass(frozen=True)
class Cores:
    """What a moment of full load showed."""

    usable: int
    """Cores that this process may run on."""
    granted: float
    """How many cores' time it got: less where others are busy, or where a container's quota is not a whole number."""
    stolen: float
    """Share of all cores' time that the hypervisor gave to other machines."""


def measure(seconds: float = 0.2) -> Cores:
    usable = cores()
    used = [0.0] * usable
    block = bytes(1 << 18)

    def work(index: int) -> None:
        begin = time.thread_time()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            hashlib.sha256(block).digest()  # without the interpreter's lock
        used[index] = time.thread_time() - begin

    before = ticks()
    start = time.monotonic()
    threads = [threading.Thread(target=work, args=(index,)) for index in range(usable)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.monotonic() - start
    after = ticks()
    share = (after.stolen - before.stolen) / max(1, after.total - before.total)
    return Cores(usable, min(float(usable), sum(used) / elapsed), share)
