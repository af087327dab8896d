"""One comparison of two numbers or two tensors: how far apart they are, how far is still rounding, and where it was worst."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Check:
    """One comparison: what, how far apart, how far apart is still rounding, and where it was worst."""

    what: str
    against: str
    difference: float
    allowed: float
    where: str = ""
    diverged: str = ""
    """Why nothing can be said: the training itself gives no numbers."""

    @property
    def passed(self) -> bool:
        return not self.diverged and bool(self.difference <= self.allowed)  # NaN does not pass

    @property
    def verdict(self) -> str:
        return "ok" if self.passed else "not proven" if self.diverged else "DIFFERENT"


@dataclass
class Worst:
    """The first comparison that went beyond what is allowed, else the one that came closest. NaN is beyond everything."""

    difference: float = 0.0
    allowed: float = 0.0
    where: str = ""
    count: int = 0

    def add(self, difference: float, allowed: float, where: str) -> None:
        self.count += 1
        if ratio(self.difference, self.allowed) > 1:
            return
        if self.count == 1 or ratio(difference, allowed) > ratio(self.difference, self.allowed):
            self.difference, self.allowed, self.where = difference, allowed, where

    def check(self, what: str, against: str) -> Check:
        return Check(what, against, self.difference, self.allowed, self.where)


def ratio(difference: float, allowed: float) -> float:
    if math.isnan(difference) or math.isnan(allowed) or math.isinf(difference):
        return math.inf
    return difference / allowed if allowed > 0 else (math.inf if difference > 0 else 0.0)


def relative(difference: float, allowed: float, length: float) -> tuple[float, float]:
    """Both as a share of the tensor's own length, where it has one."""
    return (difference / length, allowed / length) if length > 0 else (difference, allowed)


def compare_entries(worst: Worst, difference: Array, bound: Array, length: float, where: str) -> None:
    """Every entry against its own bound; shown is the worst one, as a share of the tensor's largest possible entry, its length."""
    if difference.size == 0:
        return
    size = np.abs(difference)
    if difference.shape != bound.shape or not np.isfinite(size).all():
        worst.add(math.nan, 0.0, where)
        return
    place = np.unravel_index(int(np.argmax(size / bound)), size.shape)
    worst.add(*relative(float(size[place]), float(bound[place]), length), where)
