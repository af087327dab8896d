"""The paired permutation test on ranks: exact over all 2^n swaps, and the shifts that it does not reject."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

EXACT_UP_TO = 20
BISECTIONS = 22


def rank_differences(a: Sequence[float], b: Sequence[float], shift: float) -> list[int]:
    """For each pair, the difference of its ranks in the common ranking of `a` less `shift` and `b`. Doubled: equal values share the mean rank."""
    moved = [value - shift for value in a]
    ranked = sorted([*moved, *b])
    first: dict[float, int] = {}
    for position, value in enumerate(ranked):
        first.setdefault(value, position)
    last = {value: position for position, value in enumerate(ranked)}
    return [first[x] + last[x] - first[y] - last[y] for x, y in zip(moved, b, strict=True)]


def permutation_p(ranks: Sequence[int]) -> float:
    """The two-sided p-value: the share of the 2^n swaps whose sum is at least as far from zero. Above EXACT_UP_TO pairs, its normal approximation."""
    seen = abs(sum(ranks))
    sizes = [abs(rank) for rank in ranks]
    if len(ranks) > EXACT_UP_TO:
        deviation = math.sqrt(sum(size * size for size in sizes))
        return 1.0 if deviation == 0 else math.erfc(seen / deviation / math.sqrt(2))
    # counts[t]: how many of the 2^n subsets of pairs have sizes that add up to t; the signed sum is then 2 t - whole.
    whole = sum(sizes)
    counts = [1] + [0] * whole
    for size in sizes:
        for total in range(whole, size - 1, -1):
            counts[total] += counts[total - size] if size else counts[total]
    far = sum(counts[: (whole - seen) // 2 + 1])
    return min(1.0, far / 2.0 ** (len(ranks) - 1))


def permutation_interval(a: Sequence[float], b: Sequence[float], alpha: float) -> tuple[float, float, float]:
    """The Hodges-Lehmann shift, and the ends of all shifts that the test does not reject."""
    reach = max(*a, *b) - min(*a, *b)
    shift = _boundary(-reach, reach, lambda shift: sum(rank_differences(a, b, shift)) > 0)
    far = 2 * reach + 1e-12
    low = _boundary(shift - far, shift, lambda shift: permutation_p(rank_differences(a, b, shift)) <= alpha)
    high = _boundary(shift, shift + far, lambda shift: permutation_p(rank_differences(a, b, shift)) > alpha)
    return shift, low, high


def _boundary(low: float, high: float, holds: Callable[[float], bool]) -> float:
    """Where a condition that holds on the left stops holding, by bisection."""
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return (low + high) / 2
