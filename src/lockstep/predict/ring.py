"""A message around a ring of many ranks, in one go instead of hop by hop.

In every hop a rank waits for the one before it and then takes its own time:

    now[r] = max(now[r], now[r - 1]) + hop[r]

After h hops a rank is where the longest path has led to it: one that starts at some rank s, moves on j = r - s times, and stays h - j times
where staying takes longest. Hops are of two kinds, within a host and between hosts. So a path that has met a slow one stays there, and one that
has not has fast ones only; the best start of each kind is the maximum of a range. Ten thousand ranks take milliseconds.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Times = np.ndarray[Any, Any]


def around(start: Times, hop: Times, hops: int) -> Times:
    """When each rank is done that could start at `start`; `hop` has at most two values."""
    ranks, slow = len(start), float(hop.max())
    # Three rounds: a path may go around as often as there are hops.
    starts, costs, place = np.tile(start, 3), np.tile(hop, 3), np.arange(3 * ranks)
    spent = np.cumsum(costs)
    met = np.maximum.accumulate(np.where(costs == slow, place, -1))
    end = place[2 * ranks :]
    # Moving on costs each hop once; the rest of the hops is stayed where it is slow.
    saved = starts - spent + place * slow
    slowly: Times = _maximum(saved, end - hops, met[end]) + spent[end] + (hops - end) * slow
    if (hop == slow).all():
        return slowly
    quickly = _maximum(starts, np.minimum(met[end] + 1, end), end) + hops * float(hop.min())
    found: Times = np.where(met[end] < end, np.maximum(slowly, quickly), slowly)
    return found


def _maximum(values: Times, first: Times, last: Times) -> Times:
    """The largest of values[first] to values[last], for each pair: the larger of two ranges of a power of two that cover it."""
    tables = [values]
    for level in range(int(np.log2((last - first).max() + 1))):
        before = tables[-1]
        tables.append(np.maximum(before[: -(1 << level)], before[1 << level :]))
    found = np.empty(len(first))
    levels = np.log2(last - first + 1).astype(int)
    for level in np.unique(levels):
        which = levels == level
        table = tables[level]
        found[which] = np.maximum(table[first[which]], table[last[which] - (1 << level) + 1])
    return found
