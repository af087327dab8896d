"""The alpha-beta line of a collective: time = alpha + bytes / beta, fitted so that every size counts alike."""

from __future__ import annotations

import math
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
    points = [(size, seconds) for size, seconds in points if seconds > 0]
    if len({size for size, _ in points}) < 3:
        return None
    # (alpha + size * slope) / seconds should be 1: a linear problem in alpha and slope.
    largest = max(size for size, _ in points)
    u = [1 / seconds for _, seconds in points]
    v = [size / largest / seconds for size, seconds in points]
    uu, vv, uv = _dot(u, u), _dot(v, v), _dot(u, v)
    determinant = uu * vv - uv * uv
    alpha = (sum(u) * vv - sum(v) * uv) / determinant
    slope = (sum(v) * uu - sum(u) * uv) / determinant
    if alpha < 0:
        alpha, slope = 0.0, sum(v) / vv
    elif slope < 0:
        alpha, slope = sum(u) / uu, 0.0
    errors = [alpha * a + slope * b - 1 for a, b in zip(u, v, strict=True)]
    return Line(
        alpha_us=alpha * 1e6,
        beta_gbs=largest / slope / 1e9 if slope > 0 else None,
        residual=math.sqrt(_dot(errors, errors) / len(errors)),
        n=len(points),
    )


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))
