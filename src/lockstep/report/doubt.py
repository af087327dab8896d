"""Comparisons of times that were made on a starved machine: a mark on the verdict in each cell of a table, and what it means once below."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.machine import starving
from lockstep.report.views import Cell

MARK = "*"
NOTE = f"{MARK} {starving.DOUBT}"
# What states nothing needs no doubt.
OPEN = ("not settled", "too few", "too few pairs", "baseline", "–")


def doubted(text: str, starved: bool) -> str:
    """A verdict about times, or a figure that comes from one."""
    return f"{text}{MARK}" if starved and not text.startswith(OPEN) else text


def note(rows: Sequence[Sequence[Cell]], starved: bool) -> str:
    """What stands below a table; empty where none of its cells has the mark."""
    texts = [text for row in rows for cell in row for text in (cell.text, *cell.notes)]
    return NOTE if starved and any(text.endswith(MARK) for text in texts) else ""
