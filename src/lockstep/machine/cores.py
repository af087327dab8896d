"""How much processor there really is: busy threads on every core for a moment, and the time that they were given."""

from __future__ import annotations

import hashlib
import threading
import time
from dataclasses import dataclass

from lockstep.machine.cpu import stolen_ticks
from lockstep.placement import cores


@dataclass(frozen=True)
class Cores:
    """What a moment of full load showed."""

    usable: int
    """Cores that this process may run on."""
    had: float
    """Cores' worth of time that it got: less where others are busy, or where a container's quota is smaller."""
    stolen: float
    """Share of all cores' time that the hypervisor gave to other machines."""


def measure(seconds: float = 0.2) -> Cores:
    usable = cores()
    used = [0.0] * usable
    block = bytes(1 << 18)

    def work(place: int) -> None:
        begin = time.thread_time()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            hashlib.sha256(block).digest()  # without the interpreter's lock
        used[place] = time.thread_time() - begin

    stolen, total = stolen_ticks()
    start = time.monotonic()
    threads = [threading.Thread(target=work, args=(place,)) for place in range(usable)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.monotonic() - start
    stolen_after, total_after = stolen_ticks()
    share = (stolen_after - stolen) / max(1, total_after - total)
    return Cores(usable, min(float(usable), sum(used) / elapsed), share)
