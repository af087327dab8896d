"""Axes of the plots of papers: ends, round numbers, where a value lies. The rules are those of the page (page/format.js, page/plots.js)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lockstep.report.units import digits, scale
from lockstep.report.views import Axis

Ends = tuple[float, float]


@dataclass(frozen=True)
class Marks:
    values: list[float]
    texts: list[str]
    title: str


def extent(values: Iterable[float | None], axis: Axis, from_zero: bool = False) -> Ends:
    """Least and greatest value, always apart."""
    known = [value for value in values if value is not None and not (axis.log and value <= 0)]
    if not known:
        return (1.0, 10.0) if axis.log else (0.0, 1.0)
    low, high = min(known), max(known)
    if axis.log:
        return (low / 2, high * 2) if low == high else (low, high)
    if from_zero:
        low = min(0.0, low)
    if low == high:
        more = 1.0 if axis.unit == "count" else abs(low or 1.0) / 10
        return low - more, high + more
    return low, high


def padded(ends: Ends, axis: Axis, share: float) -> Ends:
    low, high = ends
    if axis.log:
        factor = (high / low) ** share
        return low / factor, high * factor
    more = (high - low) * share
    return (low - more if low < 0 else max(0.0, low - more)), high + more


def placed(ends: Ends, begin: float, end: float, log: bool = False) -> Callable[[float], float]:
    """From values to places on the canvas."""
    low, high = (math.log(ends[0]), math.log(ends[1])) if log else ends

    def place(value: float) -> float:
        return begin + ((math.log(value) if log else value) - low) / (high - low) * (end - begin)

    return place


def marks(axis: Axis, ends: Ends, about: int) -> Marks:
    """What stands at an axis: numbers in one unit, which its title names."""
    if axis.log:
        values = _powers(ends, about, 2 if axis.unit == "binary" else 10)
        return Marks(values, [_power_text(axis.unit, value) for value in values], axis.label)
    factor, name = scale(axis.unit, max(abs(ends[0]), abs(ends[1])))
    whole = axis.unit == "count"
    step = _step(ends[0] / factor, ends[1] / factor, about, whole)
    if whole:
        step = max(1.0, round(step))
    first = math.ceil(ends[0] / factor / step - 1e-9)
    last = math.floor(ends[1] / factor / step + 1e-9)
    places = next((p for p in range(6) if abs(step * 10**p - round(step * 10**p)) < 1e-6), 6)
    values = [k * step for k in range(first, last + 1)]
    title = f"{axis.label}, {name}" if name and name != "×" else axis.label
    return Marks([value * factor for value in values], [f"{value:,.{places}f}" for value in values], title)


def _step(low: float, high: float, about: int, whole: bool) -> float:
    span = high - low or 1.0
    step: float = 10.0 ** math.floor(math.log10(span / about))
    factors = (1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10)
    return next((step * factor for factor in factors if span / (step * factor) <= about), step)


def _powers(ends: Ends, about: int, base: int) -> list[float]:
    first = math.floor(math.log(ends[0], base) + 1e-9)
    last = math.ceil(math.log(ends[1], base) - 1e-9)
    every = max(1, math.ceil((last - first) / about))
    found = [float(base) ** k for k in range(first, last + 1, every)]
    return [value for value in found if ends[0] * 0.999 <= value <= ends[1] * 1.001]


def _power_text(unit: str, value: float) -> str:
    factor, name = scale(unit, value)
    return f"{digits(value / factor, 1)}{' ' + name if name else ''}"
