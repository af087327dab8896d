"""How a backend sends messages between hosts: how many one-way delays its collectives take.

A gloo rank says that it is ready to receive before the other one sends. Where it can say so only when its last part has arrived, a hop takes
two delays; where it has said so before, one. Counted from gloo's own loops (allreduce.cc, allgather.cc, broadcast.cc), and measured between
emulated hosts (docs/predict.md):

    all-gather   two delays a hop: a rank asks for the next part when it has this one
    all-reduce   two delays a hop where every rank has a part of the message. A message of few numbers has parts for some ranks only: the others
                 have nothing to wait for, ask early, and most of its hops take one
    broadcast    all ranks ask at once, and a rank sends to all of its own without waiting: two delays, and one more for each rank in between.
                 Of a series (ZeRO) two are under way at a time. Ranks that are done with one ask for the next while others still wait, so
                 that each of the following costs what one among four ranks does
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# What TCP may send at once after a pause: ten segments. It spreads more than that over the round trip: up to 0.7 of a delay more for parts from
# 24 KB on, as measured between two emulated hosts at delays of 5 and 50 ms (docs/predict.md).
AT_ONCE_BYTES = 10 * 1448.0
PACED, PACED_BYTES = 0.7, 24e3 - AT_ONCE_BYTES
# Ranks that a broadcast behind others waits for.
FOLLOWING = 4
# gloo divides a message into two segments a rank, of whole numbers.
SEGMENTS = 2


@dataclass(frozen=True)
class Protocol:
    """How a backend sends one message between hosts."""

    asks: bool
    """Whether the receiver says that it is ready before the other one sends."""
    window: float
    """Bytes in flight before it has to wait for the receiver again."""
    at_once: int = 1
    """How many collectives may be under way at a time: gloo has two threads for them."""

    @property
    def trips(self) -> int:
        """One-way delays of a hop by itself."""
        return 2 if self.asks else 1

    def delays(self, size: float, trips: float) -> float:
        """One-way delays of a hop of N bytes."""
        spread = PACED * min(1.0, max(0.0, size - AT_ONCE_BYTES) / PACED_BYTES)
        return max(1.0, size / self.window) * trips + spread

    def around(self, collective: str, ranks: int, size: float, number: int = 4) -> float:
        """One-way delays of a ring that exchanges `size` bytes in all, of numbers of `number` bytes each."""
        if collective == "all_gather":
            return self.trips * (ranks - 1)
        if not self.asks:
            return (2 if collective == "all_reduce" else 1) * (ranks - 1)
        segment = number * math.ceil(size / (SEGMENTS * ranks) / number)
        parts = math.ceil(math.ceil(size / segment) / SEGMENTS) if size else 0
        # As many hops as there are, one ask, and one more for each part that follows another; the last half of the parts meets the first again.
        return min(4 * (ranks - 1), 2 * ranks - 1 + max(0, parts - 1) + max(0, 2 * parts - ranks))

    def down(self, ranks: int) -> int:
        """One-way delays of a broadcast over a tree."""
        if ranks == 1:
            return 0
        return 1 + int(math.log2(ranks)) if self.asks else math.ceil(math.log2(ranks))


# At most two parts of 1 MiB are in flight at a time. Other backends are assumed to send at once; there was no second machine to measure them on.
PROTOCOLS = {"gloo": Protocol(asks=True, window=2 << 20, at_once=2)}
SENDS_AT_ONCE = Protocol(asks=False, window=math.inf)


def protocol_of(backend: str) -> Protocol:
    return PROTOCOLS.get(backend, SENDS_AT_ONCE)
