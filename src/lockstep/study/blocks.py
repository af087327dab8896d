"""Blocks: the runs of one repeat of all cells, made one right after the other, so that what slows the machine slows all of them.

A study may be stopped in the middle of a block, or get a new cell. Then runs of one repeat are days apart, and comparing their times would
compare the days. So the runs of a repeat count as one block only as far as they followed each other.
"""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.metrics import METRICS
from lockstep.run import ENDED, Run
from lockstep.study.plan import Item, Planned

# Two runs with a longer idle time between them do not belong to one block.
APART_S = 600.0
Block = tuple[int, int]
"""The repeat, and which uninterrupted part of it."""


def sittings(planned: Planned, there: Mapping[str, Run]) -> dict[str, Block]:
    """The block of each run, by digest."""
    found: dict[str, Block] = {}
    for repeat, runs in _by_repeat(planned, there).items():
        stretch, busy_until = 0, float("inf")
        for item, begin, end in runs:
            if begin - busy_until > APART_S and not _on_a_cluster(planned, item):
                stretch += 1
            found[item.digest] = repeat, stretch
            busy_until = end
    return found


def broken(planned: Planned, there: Mapping[str, Run], to_do: set[str], now: float) -> list[Item]:
    """Finished runs that have to be run again: those of an incomplete repeat that was interrupted for too long.

    Accuracies do not depend on when they were measured: if nothing else is compared, every run is kept.
    """
    if not any(
        METRICS[metric].kind in ("time", "rate") or METRICS[metric].unit == "seconds"
        for metric in planned.study.metrics
    ):
        return []
    blocks, found = sittings(planned, there), []
    open_ones = {item.repeat for item in planned.items if item.digest in to_do}
    for repeat, runs in _by_repeat(planned, there).items():
        if repeat not in open_ones:
            continue
        newest = max(blocks[item.digest] for item, _, _ in runs)
        late = now - max(end for _, _, end in runs) > APART_S
        found += [
            item
            for item, _, _ in runs
            if (late or blocks[item.digest] != newest) and not _on_a_cluster(planned, item) and item.digest not in to_do
        ]
    return found


def _by_repeat(planned: Planned, there: Mapping[str, Run]) -> dict[int, list[tuple[Item, float, float]]]:
    """The runs of each repeat in the order of time: when each began and ended."""
    found: dict[int, list[tuple[Item, float, float]]] = {}
    for item in planned.items:
        run = there.get(item.digest)
        if run is not None:
            begin, status = run.spec().created, run.recorded_status()
            end = float(status.get("since") or begin) if status.get("state") in ENDED else begin
            found.setdefault(item.repeat, []).append((item, begin, max(begin, end)))
    return {repeat: sorted(runs, key=lambda run: run[1]) for repeat, runs in found.items()}


def _on_a_cluster(planned: Planned, item: Item) -> bool:
    """Slurm decides when and where a job runs, and gives it its own nodes: such runs need no blocks."""
    return planned.cell(item.cell).placement.launcher == "slurm"
