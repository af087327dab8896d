"""How numbers are written: digits that count, and a unit of a fitting size. The page's script gets the same table (`for_page`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

MOST = 10**12
"""No setting needs more, and beyond it files cannot be laid out and floats lose whole numbers."""
FEW = 3
"""So few values hardly know their own spread: an interval of theirs may reach from nothing to anything."""
WIDE_RATIO, WIDE_POINTS = 2.0, 0.1
"""Where its ends differ by more than this and it leaves open which way a difference goes, it is not written."""


class Unit(NamedTuple):
    steps: Sequence[tuple[float, float, str]] = ()
    """From this size on, divided by this, written with that."""
    base: str = ""
    """What values are in; the heading of a column of plain numbers says so."""
    digits: int = 3
    """Digits that count."""
    places: int | None = None
    """Decimal places instead."""


UNITS: dict[str, Unit] = {
    "number": Unit(digits=4),
    "count": Unit(places=0),
    "seconds": Unit([(1.0, 1.0, "s"), (1e-3, 1e-3, "ms"), (0.0, 1e-6, "µs")], "s"),
    "bytes": Unit([(1e9, 1e9, "GB"), (1e6, 1e6, "MB"), (1e3, 1e3, "kB"), (0.0, 1.0, "B")], "B"),
    "binary": Unit(
        [(1 << 30, 1 << 30, "GiB"), (1 << 20, 1 << 20, "MiB"), (1 << 10, 1 << 10, "KiB"), (0.0, 1.0, "B")], "B"
    ),
    "percent": Unit([(0.0, 0.01, "%")], "share of 1", places=2),
    "times": Unit([(0.0, 1.0, "×")], "x", places=2),
    "rate": Unit([(0.0, 1.0, "samples/s")], "samples/s", digits=4),
    "bandwidth": Unit([(1.0, 1.0, "GB/s"), (0.0, 1e-3, "MB/s")], "GB/s"),
}


def for_page() -> dict[str, dict[str, Any]]:
    return {name: unit._asdict() for name, unit in UNITS.items()}


def scale(unit: str, size: float) -> tuple[float, str]:
    """What numbers up to this size are divided by, and the unit's name then."""
    for least, factor, name in UNITS[unit].steps:
        if abs(size) >= least:
            return factor, name
    return 1.0, ""


def digits(value: float, count: int) -> str:
    """N significant digits, and never an exponent where people would not expect one."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    if abs(value) < 1e-6 or abs(value) >= 1e15:
        return f"{value:.{count - 1}e}"
    return f"{value:,.{max(0, count - 1 - math.floor(math.log10(abs(value))))}f}"


def bare(value: float, unit: str, factor: float = 1.0) -> str:
    """A number without its unit's name."""
    written = UNITS[unit]
    if written.places is not None:
        return f"{value / factor:,.{written.places}f}"
    return digits(value / factor, written.digits)


def text(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    factor, name = scale(unit, value)
    gap = "" if not name or unit == "times" else " "
    return f"{bare(value, unit, factor)}{gap}{name}"


def span(value: float | None, low: float | None, high: float | None, unit: str, n: int | None = None) -> str:
    """A value with its interval in one unit: 10.2 s (9.98–10.4). `n`: of how many values."""
    if value is None or low is None or high is None:
        return text(value, unit)
    if _few(n) and high > max(low, WIDE_RATIO * low):
        return f"{text(value, unit)} {_no_interval(n)}"
    factor, _ = scale(unit, value)
    return f"{text(value, unit)} ({bare(low, unit, factor)}–{bare(high, unit, factor)})"


def duration(seconds: float) -> str:
    return text(seconds, "seconds")


def clock(seconds: float) -> str:
    """How long something takes, for people: 40 s, 12 min, 3.5 h, 3.0 days."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds >= 172_800:
        return f"{seconds / 86_400:.1f} days"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def counted(count: int, noun: str, several: str = "") -> str:
    """1 rank, 2 ranks. `several`: the plural, where an s does not make it."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {several or noun + 's'}"


def percent(share: float) -> str:
    """A part of a whole, in a sentence: 45%, 4.5%."""
    return f"{share:.0%}" if abs(share) >= 0.1 else f"{share:.1%}"


def points(difference: float, low: float | None = None, high: float | None = None, n: int | None = None) -> str:
    """A difference of accuracies: +0.31 points (−0.12 to +0.74). `n`: of how many pairs."""
    told = f"{_hundredths(difference)} points"
    if _few(n) and (low is None or high is None or (low <= 0 <= high and high - low > WIDE_POINTS)):
        return f"{told} {_no_interval(n)}"
    return told if low is None or high is None else f"{told} ({_hundredths(low)} to {_hundredths(high)})"


def _hundredths(value: float) -> str:
    return f"{100 * value:+.2f}".replace("-", "−")


def ratio(effect: float, low: float | None, high: float | None, n: int | None = None) -> str:
    """0.625× (0.601–0.648), with as many places as the interval bears. `n`: of how many pairs."""
    if _few(n) and (low is None or high is None or (low <= 1 <= high and high > WIDE_RATIO * low)):
        return f"{effect:.2f}× {_no_interval(n)}"
    if low is None or high is None:
        return f"{effect:.2f}×"
    places = 2 if high - low > 0.1 else 3
    return f"{effect:.{places}f}× ({low:.{places}f}–{high:.{places}f})"


def _few(n: int | None) -> bool:
    return n is not None and n <= FEW


def _no_interval(n: int | None) -> str:
    return f"(n={n}: no interval)"
