"""How numbers are written in findings: the same units everywhere."""

from __future__ import annotations


def ms(seconds: float) -> str:
    """A time of the size of a step."""
    value = abs(seconds)
    if value >= 10:
        return f"{seconds:.1f} s"
    if value >= 0.1:
        return f"{seconds * 1e3:.0f} ms"
    return f"{seconds * 1e3:.2f} ms" if value >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def percent(share: float) -> str:
    return f"{share:.0%}" if abs(share) >= 0.1 else f"{share:.1%}"


def points(difference: float) -> str:
    """A difference of accuracies."""
    return f"{100 * difference:+.2f} points"


def interval(low: float, high: float, form: str = "{:.2f}") -> str:
    return f"{form.format(low)} to {form.format(high)}"
