"""Two ranks against one at the same global batch; for honesty also against one rank that has both cores, and against
two ranks that exchange nothing, which is what the machine itself allows."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from benchmarks import no_exchange, ours, stats
from benchmarks.record import Section, compare
from benchmarks.rounds import Contender, interleave
from benchmarks.settings import Settings

GLOBAL_BATCH = 256
ONE = "ranks=1 threads=1"
TWO = "ranks=2 threads=1"
WIDE = "ranks=1 threads=2"
LIMIT = "ranks=2 threads=1, no exchange"
TARGET = 1.7
LOSS_TOLERANCE = 1e-3


def measure(settings: Settings) -> Section:
    """Lockstep alone; cores are not pinned from outside, because placing ranks is Lockstep's own business."""
    layout = {ONE: (1, 1), TWO: (2, 1), WIDE: (1, 2)}
    contenders: dict[str, Contender] = {
        name: partial(ours.train, GLOBAL_BATCH, ranks, threads, settings.samples, None)
        for name, (ranks, threads) in layout.items()
    }
    strategy = f"strategy={Path(no_exchange.__file__)}:NoExchange"
    contenders[LIMIT] = partial(ours.train, GLOBAL_BATCH, 2, 1, settings.samples, None, (strategy,))
    outcome = interleave("scaling", contenders, settings.repeats, settings.seed)
    section = Section(
        "scaling",
        f"Two ranks against one at global batch {GLOBAL_BATCH}",
        "images",
        "rate",
        outcome.measurements,
    )
    for faster, slower, target in (
        (TWO, ONE, TARGET),
        (WIDE, ONE, None),
        (TWO, WIDE, None),
        (LIMIT, ONE, None),
        (TWO, LIMIT, None),
    ):
        found = compare(outcome.measurements, faster, slower, "speed", "wall", target)
        if found:
            section.comparisons.append(found)
    for name, reason in outcome.failures.items():
        section.refuse(f"{name} failed: {reason}")
    check(section)
    return section


def check(section: Section) -> None:
    """Ranks must not change the mathematics, and two ranks need two cores for a fair answer."""
    if not section.measurements:
        section.refuse("nothing was measured")
        return
    spread = stats.relative_spread([one.details["loss"] for one in section.measurements if one.contender != LIMIT])
    section.notes.append(f"Mean training losses differ by {spread:.1e} at most over all placements and rounds.")
    if spread > LOSS_TOLERANCE:
        section.refuse(f"losses differ by {spread:.1e}, more than {LOSS_TOLERANCE:.0e}: not the same mathematics")
    if len(os.sched_getaffinity(0)) < 2:
        section.refuse("two ranks need two cores, and this process may use one")
