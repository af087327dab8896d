"""The statistics of comparisons, of studies and of all else that is timed in turns: intervals that hold with three to ten repeats, and verdicts that say when nothing can be said.

Cells are compared pair by pair: trainings with one seed, or what was timed right after each other. Where nothing differs, the two of a pair
could as well be swapped: a paired permutation test on ranks, over all 2^n swaps, gives the exact p-value, whatever the
noise looks like. It adds up ranks, not seconds, so one disturbed run cannot outweigh the others. The estimate that goes with it is the
Hodges-Lehmann shift: the one that makes the rank sums of both sides equal. With few pairs no outcome of the test is rare enough for the level
asked for, and Student's t takes its place: wide there, and safe for symmetric noise with heavy tails. Two or three pairs of trainings are
judged by what seeds change in all cells together (pooled.py).

The comparisons of one metric are one family: Holm's procedure keeps the probability of any false verdict among them at 5 %. "The same" is an
equivalence test (TOST): the whole interval lies within the equivalence margin. docs/studies.md has what this comes to in simulations.

Distributions come from scipy.special: importing scipy.stats takes 0.8 s, which is more than all of `lockstep compare`. scipy's own
permutation_test and wilcoxon are not used: the first would enumerate 2^20 swaps 66 times for each comparison, the second is exact only without
ties and knows no drift. The tests compare with all of them.

May import metrics.py. Its doors are `compare_family` for cells that were measured pair by pair, `median_interval` for one cell, and
`t_quantile`.
"""

from __future__ import annotations

from lockstep.statistics.comparisons import (
    ALPHA,
    MARGIN_DIFFERENCE,
    MARGIN_RATIO,
    WORDS,
    Comparison,
    Verdict,
    compare,
    compare_family,
)
from lockstep.statistics.intervals import Interval, median_interval, t_p, t_quantile
from lockstep.statistics.pooled import Spread, pooled

__all__ = [
    "ALPHA",
    "MARGIN_DIFFERENCE",
    "MARGIN_RATIO",
    "WORDS",
    "Comparison",
    "Interval",
    "Spread",
    "Verdict",
    "compare",
    "compare_family",
    "median_interval",
    "pooled",
    "t_p",
    "t_quantile",
]
