"""Rounds: everyone once in each, so that a machine which changes its speed changes it for all of them alike.

The order is drawn anew for each round: nobody always comes first after a pause, or finds the caches as the same other one leaves them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import TypeVar

T = TypeVar("T")
# OpenMP's threads look for more work before they go to sleep, for about 5 ms. Meanwhile they hold the cores of whoever is next: two ranks
# seemed to be 10 % slower than two threads that had their windows before them (docs/race.md).
LINGER_S = 0.02


def rounds(
    everyone: Sequence[T], most: int, *, least: int = 1, seconds: float = math.inf, seed: int = 0
) -> Iterator[list[T]]:
    """Up to `most` orders; after `seconds` no more, once there were `least`. The same seed draws the same orders, on every rank."""
    draw, begun = random.Random(seed), perf_counter()
    for number in range(most):
        if number >= least and perf_counter() - begun > seconds:
            return
        yield draw.sample(everyone, len(everyone))


def calls_in(seconds: float, once: float, most: int = 1000) -> int:
    """How many calls of `once` seconds fill a window."""
    return max(1, min(most, round(seconds / max(once, 1e-9))))


def multiple(steps: int, together: int) -> int:
    """At least as many steps, and a multiple of those that belong together: a strategy that exchanges every N steps is timed over N."""
    return -(-steps // together) * together
