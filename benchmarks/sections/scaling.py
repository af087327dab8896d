"""Two ranks against one at the same global batch; for honesty also against one rank that has both cores, and against
two ranks that exchange nothing, which is what the machine itself allows.

In turns: an epoch of this net takes half a second, of which ranks that wait for each other's start would be a part.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from benchmarks import no_exchange, ours, stats
from benchmarks.record import Measurement, Section, compare
from benchmarks.settings import Settings
from lockstep.run import Run
from lockstep.settings import load
from lockstep.turns import Ranks
from lockstep.turns.survey import Survey
from lockstep.verify.records import step_losses

GLOBAL_BATCH = 256
ONE = "ranks=1 threads=1"
TWO = "ranks=2 threads=1"
WIDE = "ranks=1 threads=2"
LIMIT = "ranks=2 threads=1, no exchange"
STARTS_PER_REPEAT, ROUNDS, SECONDS = 2, 12, 30.0
FIRST_STEPS, LOSS_TOLERANCE = 50, 1e-3


def measure(settings: Settings) -> Section:
    """Lockstep alone; cores are not pinned from outside, because placing ranks is Lockstep's own business."""
    title = f"Two ranks against one at global batch {GLOBAL_BATCH}"
    section = Section("scaling", title, "images", "rate", [])
    if len(os.sched_getaffinity(0)) < 2:
        section.refuse("two ranks need two cores, and this process may use one")
        return section
    nothing = f"strategy={Path(no_exchange.__file__)}:NoExchange"
    words = {ONE: ONE.split(), TWO: TWO.split(), WIDE: WIDE.split(), LIMIT: [*TWO.split(), nothing]}
    common = [*ours.RECIPE, f"global_batch={GLOBAL_BATCH}", "test_limit=100"]
    losses: dict[str, NDArray[Any]] = {}

    def ended(name: str, run: Run) -> None:
        losses[name] = step_losses(run)[:FIRST_STEPS]

    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        racing = [
            Ranks(name, *load([], [*common, *mine]), Path(folder) / name, ended=partial(ended, name))
            for name, mine in words.items()
        ]
        survey = Survey(racing, SECONDS, ROUNDS, STARTS_PER_REPEAT * settings.repeats)
        survey.run()
    for start in dict.fromkeys(window.start for window in survey.windows):
        for name in words:
            _add(section, survey, name, start)
    for faster, slower, target in (
        (TWO, ONE, 1.7),
        (WIDE, ONE, None),
        (TWO, WIDE, 1.0),
        (LIMIT, ONE, None),
        (TWO, LIMIT, None),
    ):
        found = compare(section.measurements, faster, slower, "speed", "wall", target)
        if found:
            section.comparisons.append(found)
    for name, reason in survey.failures.items():
        section.refuse(f"{name} failed: {reason}")
    section.notes.append(f"A figure is of one start: the median of its windows, {ROUNDS} rounds in turns.")
    check(section, {name: found for name, found in losses.items() if name != LIMIT})
    return section


def check(section: Section, losses: Mapping[str, NDArray[Any]]) -> None:
    """Ranks must not change the mathematics."""
    if ONE not in losses:
        section.refuse("nothing was measured")
        return
    spread = max(float(abs(found / losses[ONE] - 1).max()) for found in losses.values())
    section.notes.append(f"Losses of the first {FIRST_STEPS} steps differ by {spread:.1e} at most over all placements.")
    if not spread <= LOSS_TOLERANCE:
        section.refuse(f"losses differ by {spread:.1e}, more than {LOSS_TOLERANCE:.0e}: not the same mathematics")


def _add(section: Section, survey: Survey, name: str, start: int) -> None:
    windows = [each for each in survey.of(name) if each.start == start]
    if not windows:
        return
    wall, cpu = (stats.median([each.cost(clock) for each in windows]) for clock in ("wall", "cpu"))
    images = math.floor(sum(each.samples for each in windows))
    order = len(section.measurements) + 1
    section.measurements.append(Measurement(order, start, name, images, wall * images, cpu * images))
