"""What `backend=auto` comes to: the fastest correct backend measured on this machine, for the message size at hand.

Where it was not measured, ranks of one host share its memory: of what every launcher can start it was the fastest wherever it was measured
(docs/comms.md).
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from itertools import pairwise
from pathlib import Path

from lockstep.backends.costs import store
from lockstep.backends.costs.cells import Cell
from lockstep.backends.costs.plan import missing

BETWEEN_HOSTS = {"cpu": "gloo", "cuda": "nccl"}
# From here on a message's time is that of its bytes, so that what is larger than all that was measured can be told from it.
BANDWIDTH_BYTES = 10**6


def best(
    bytes_per_exchange: int,
    ranks: int,
    cache: Path | None = None,
    *,
    device: str = "cpu",
    among: Collection[str] | None = None,
) -> tuple[str, str]:
    """The backend for ranks of one host, and a one-line reason with numbers. Without measurements: shm (nccl on CUDA), and how to get some.

    `among` narrows the choice, for example to what the launcher can start; `cache` is the folder of measurements.
    """
    known = [cell for cell in store.load(cache) if cell.collective == "all_reduce" and cell.device == device]
    fitting = [cell for cell in known if cell.ranks == ranks and (among is None or cell.backend in among)]
    names = sorted({cell.backend for cell in fitting})
    wrong = [name for name in names if any(cell.state == "WRONG" for cell in fitting if cell.backend == name)]
    gone = [name for name in names if missing(name, device)]
    times: dict[str, float] = {}
    for name in names:
        points = [cell for cell in fitting if cell.backend == name and cell.state == "ok" and cell.median_us]
        if _reaches(points, bytes_per_exchange) and name not in wrong and name not in gone:
            times[name] = interpolate(points, bytes_per_exchange)
    failed = {cell.backend for cell in known if cell.state != "ok"}
    shared = device == "cpu" and (among is None or "shm" in among) and not missing("shm", device)
    # What others were measured at says nothing against shared memory that was not.
    if shared and "shm" not in times and "shm" not in failed:
        measured = [cell for cell in fitting if cell.backend == "shm"]
        return "shm", _untried("shm", bytes_per_exchange if measured else None, ranks, wrong)
    if not times:
        between = BETWEEN_HOSTS[device]
        return between, _untried(between, bytes_per_exchange if fitting else None, ranks, wrong)
    order = sorted(times, key=lambda name: times[name])
    first, others = order[0], order[1:]
    text = f"{first}: {_us(times[first])} for {bytes_per_exchange:,} bytes with {ranks} ranks"
    text += "".join(f", {name} {_us(times[name])}" for name in others) or ", the only one measured"
    left_out = "".join(f", {name} left out (its results were WRONG)" for name in wrong)
    when = max(cell.time for cell in fitting if cell.backend == first)
    return first, f"{text}{left_out}; measured {time.strftime('%Y-%m-%d', time.localtime(when))}"


def _reaches(points: list[Cell], size: int) -> bool:
    """Whether a time at `size` follows from what was measured."""
    return max((cell.message_bytes for cell in points), default=-1) >= min(size, BANDWIDTH_BYTES)


def _untried(backend: str, size: int | None, ranks: int, wrong: list[str]) -> str:
    """`size`: where other sizes were measured."""
    what = "it was not measured" if backend == "shm" else "nothing measured"
    why = what if size is None else f"{what} for {size:,} bytes"
    why = f"{', '.join(wrong)} gave WRONG results when measured" if wrong else why
    why = f"ranks of one host share its memory; {why}" if backend == "shm" else why
    more = "" if ranks == 2 else f" --ranks {ranks}"
    return f"{backend}: {why} on this machine with {ranks} ranks: 'lockstep comms{more}' lets auto choose by speed"


def interpolate(points: list[Cell], size: int) -> float:
    """Microseconds at `size`: on a straight line between the neighbours in log-log, at constant latency below the smallest size
    and constant bandwidth above the largest."""
    table = sorted((cell.message_bytes, float(cell.median_us or 0.0)) for cell in points)
    if size <= table[0][0]:
        return table[0][1]
    for (low, before), (high, after) in pairwise(table):
        if size <= high:
            share = math.log(size / low) / math.log(high / low)
            return before * math.exp(share * math.log(after / before))
    largest, seconds = table[-1]
    return seconds * size / largest


def _us(microseconds: float) -> str:
    return f"{microseconds:.1f} µs" if microseconds < 10 else f"{microseconds:,.0f} µs"
