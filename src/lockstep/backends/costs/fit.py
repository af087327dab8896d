"""The alpha-beta line of a collective: time = alpha + bytes / beta, fitted so that every size counts alike."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A fitted line. `residual` is the root mean square of the relative errors; 0.1 means off by 10 % as a rule."""

    alpha_us: float
    beta_gbs: float | None
    """None where time does not grow with size within what was measured."""
    residual: float
    n: int


def fit(points: Sequence[tuple[float, float]]) -> Line | None:
    """Least squares on the relative error over (bytes, seconds); None for fewer than three sizes.

    Absolute errors would let 64 MiB alone decide the line. Neither alpha nor 1 / beta can be negative; where the best line would
    have one below zero, it is zero and the other is fitted again.
    """
    import numpy as np  # not above: whoever only reads cells has no use for it

    points = [(size, seconds) for size, seconds in points if seconds > 0]
    if len({size for size, _ in points}) < 3:
        return None
    size, seconds = np.array(points).T
    # (alpha + size * slope) / seconds should be 1: a linear problem in alpha and slope.
    largest = float(size.max())
    columns = np.stack([1 / seconds, size / largest / seconds], axis=1)
    ones = np.ones(len(points))
    alpha, slope = np.linalg.lstsq(columns, ones)[0].tolist()
    if alpha < 0:
        alpha, slope = 0.0, float(columns[:, 1].sum() / np.sum(columns[:, 1] ** 2))
    elif slope < 0:
        alpha, slope = float(columns[:, 0].sum() / np.sum(columns[:, 0] ** 2)), 0.0
    errors = columns @ (alpha, slope) - ones
    return Line(
        alpha_us=alpha * 1e6,
        beta_gbs=largest / slope / 1e9 if slope > 0 else None,
        residual=float(np.sqrt(np.mean(errors**2))),
        n=len(points),
    )
