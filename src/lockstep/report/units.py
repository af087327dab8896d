"""How numbers are written: digits that count, and a unit of a fitting size."""

from __future__ import annotations

import math

# Of each unit the steps: from this size on, divided by this, written with that.
_STEPS: dict[str, list[tuple[float, float, str]]] = {
    "seconds": [(1.0, 1.0, "s"), (1e-3, 1e-3, "ms"), (0.0, 1e-6, "µs")],
    "bytes": [(1e9, 1e9, "GB"), (1e6, 1e6, "MB"), (1e3, 1e3, "kB"), (0.0, 1.0, "B")],
    "binary": [(1 << 30, 1 << 30, "GiB"), (1 << 20, 1 << 20, "MiB"), (1 << 10, 1 << 10, "KiB"), (0.0, 1.0, "B")],
    "percent": [(0.0, 0.01, "%")],
    "times": [(0.0, 1.0, "×")],
    "rate": [(0.0, 1.0, "images/s")],
    "bandwidth": [(1.0, 1.0, "GB/s"), (0.0, 1e-3, "MB/s")],
}


def steps(unit: str) -> list[tuple[float, float, str]]:
    return _STEPS.get(unit, [])


def scale(unit: str, size: float) -> tuple[float, str]:
    """What numbers up to this size are divided by, and the unit's name then."""
    for least, factor, name in _STEPS.get(unit, []):
        if abs(size) >= least:
            return factor, name
    return 1.0, ""


def digits(value: float, count: int) -> str:
    """So many digits that count, and never an exponent where people would not expect one."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    if abs(value) < 1e-6 or abs(value) >= 1e15:
        return f"{value:.{count - 1}e}"
    return f"{value:,.{max(0, count - 1 - math.floor(math.log10(abs(value))))}f}"


def bare(value: float, unit: str, factor: float = 1.0) -> str:
    """A number without its unit's name."""
    if unit == "count":
        return f"{value:,.0f}"
    if unit in ("percent", "times"):
        return f"{value / factor:.2f}"
    return digits(value / factor, 4 if unit in ("number", "rate") else 3)


def text(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    factor, name = scale(unit, value)
    gap = "" if not name or unit == "times" else " "
    return f"{bare(value, unit, factor)}{gap}{name}"


def span(value: float | None, low: float | None, high: float | None, unit: str) -> str:
    """A value with its interval in one unit: 10.2 s (9.98–10.4)."""
    if value is None or low is None or high is None:
        return text(value, unit)
    factor, _ = scale(unit, value)
    return f"{text(value, unit)} ({bare(low, unit, factor)}–{bare(high, unit, factor)})"
