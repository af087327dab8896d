"""The digits and shapes of the embedded sets, and how far every point of a grid is from them.

Paths are written as in SVG: M moves, L draws a line, Q a quadratic curve (control point, end), in a box of
100 by 100 with y downwards. From these come *distance fields*: one number per grid point, so that the width
of a stroke and the softness of its edge are chosen later, per image, by a threshold.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

FIELD = 72  # points of a field per side
LOW = -40.0  # coordinate of its first point
STEP = 2.5  # between points: the field covers -40 to 137.5
_PIECES = 8  # straight pieces per curve

Floats = NDArray[np.float32]
Segment = tuple[float, float, float, float]

# Several ways of writing where people differ.
DIGITS: tuple[tuple[str, ...], ...] = (
    ("M50 12 Q76 12 76 50 Q76 88 50 88 Q24 88 24 50 Q24 12 50 12",
     "M50 12 Q70 12 70 50 Q70 88 50 88 Q30 88 30 50 Q30 12 50 12"),
    ("M50 12 L50 88", "M34 28 L52 12 L52 88", "M34 28 L52 12 L52 88 M34 88 L70 88"),
    ("M26 32 Q28 12 50 12 Q74 12 74 32 Q74 50 48 66 L26 88 L76 88",
     "M26 30 Q30 12 50 12 Q74 12 72 34 Q68 58 38 82 Q28 90 28 80 Q34 68 54 84 Q66 90 78 80"),
    ("M28 22 Q36 12 50 12 Q72 12 72 30 Q72 48 46 48 Q76 48 76 68 Q76 88 50 88 Q32 88 25 76",
     "M28 12 L72 12 L46 44 Q76 44 76 66 Q76 88 50 88 Q32 88 25 76"),
    ("M60 88 L60 12 L22 64 L80 64", "M32 12 L26 54 L78 54 M64 20 L64 88"),
    ("M72 12 L34 12 L30 46 Q40 38 52 38 Q76 38 76 62 Q76 88 50 88 Q32 88 24 76",
     "M70 14 L36 12 L34 44 Q72 38 72 64 Q72 88 28 86"),
    ("M66 14 Q28 26 26 64 Q26 88 50 88 Q74 88 74 66 Q74 46 50 46 Q30 46 26 64",
     "M44 12 Q28 40 28 66 Q28 88 50 88 Q70 88 70 70 Q70 54 52 54 Q34 54 28 68"),
    ("M24 12 L76 12 L42 88", "M24 14 L76 12 L42 88 M34 50 L70 50", "M26 26 L26 12 L74 12 Q52 44 46 88"),
    ("M50 48 Q28 46 28 30 Q28 12 50 12 Q72 12 72 30 Q72 46 50 48 "
     "Q24 52 24 70 Q24 88 50 88 Q76 88 76 70 Q76 52 50 48",
     "M70 22 Q54 6 36 18 Q24 32 50 48 Q78 62 68 80 Q52 96 32 82 Q22 64 50 48 Q72 38 70 22"),
    ("M74 36 Q74 54 50 54 Q26 54 26 34 Q26 12 50 12 Q74 12 74 36 L70 88",
     "M72 34 Q70 52 50 52 Q28 52 28 32 Q28 12 50 12 Q74 12 74 40 Q74 80 34 88"),
)  # fmt: skip

# Outlines to be filled; an outline inside another is a hole.
SHAPES: tuple[tuple[str, ...], ...] = (
    ("M50 16 Q84 16 84 50 Q84 84 50 84 Q16 84 16 50 Q16 16 50 16",),
    ("M20 20 L80 20 L80 80 L20 80 L20 20",),
    ("M50 16 L86 80 L14 80 L50 16",),
    ("M50 10 L60 38 L90 38 L66 56 L76 86 L50 68 L24 86 L34 56 L10 38 L40 38 L50 10",),
    ("M50 14 Q86 14 86 50 Q86 86 50 86 Q14 86 14 50 Q14 14 50 14 "
     "M50 34 Q66 34 66 50 Q66 66 50 66 Q34 66 34 50 Q34 34 50 34",),
    ("M38 14 L62 14 L62 38 L86 38 L86 62 L62 62 L62 86 L38 86 L38 62 L14 62 L14 38 L38 38 L38 14",),
    ("M50 86 L18 50 Q10 18 34 18 Q48 18 50 36 Q52 18 66 18 Q90 18 82 50 L50 86",),
    ("M62 12 Q20 16 20 50 Q20 84 62 88 Q84 88 86 80 Q46 78 46 50 Q46 22 86 20 Q84 12 62 12",
     "M38 12 Q80 16 80 50 Q80 84 38 88 Q16 88 14 80 Q54 78 54 50 Q54 22 14 20 Q16 12 38 12"),
    ("M50 10 L86 46 L62 46 L62 90 L38 90 L38 46 L14 46 L50 10",
     "M50 90 L86 54 L62 54 L62 10 L38 10 L38 54 L14 54 L50 90"),
    ("M16 16 L84 16 L56 50 L84 84 L16 84 L44 50 L16 16",
     "M16 16 L16 84 L50 56 L84 84 L84 16 L50 44 L16 16"),
)  # fmt: skip


def distance_fields(classes: tuple[tuple[str, ...], ...], signed: bool) -> tuple[Floats, list[list[int]]]:
    """Distance to the line of every way of writing every class (`signed`: negative inside of an outline), and which fields belong to which class."""
    fields: list[Floats] = []
    owners: list[list[int]] = []
    for ways in classes:
        owners.append(list(range(len(fields), len(fields) + len(ways))))
        fields += [_field(_segments(way), signed) for way in ways]
    return np.stack(fields), owners


def _segments(path: str) -> list[Segment]:
    """The straight pieces of a path; whole numbers divided by a power of two, so exact."""
    pieces: list[Segment] = []
    x = y = 0.0
    for command in _commands(path):
        kind, numbers = command[0], [float(number) for number in command[1:].split()]
        end_x, end_y = numbers[-2:]
        if kind == "L":
            pieces.append((x, y, end_x, end_y))
        elif kind == "Q":
            bend_x, bend_y = numbers[:2]
            points = [_curve(x, y, bend_x, bend_y, end_x, end_y, step / _PIECES) for step in range(_PIECES + 1)]
            pieces += [(*a, *b) for a, b in pairwise(points)]
        x, y = end_x, end_y
    return pieces


def _commands(path: str) -> list[str]:
    marked = path.replace("M", "|M").replace("L", "|L").replace("Q", "|Q")
    return [command for command in marked.split("|") if command]


def _curve(x0: float, y0: float, cx: float, cy: float, x1: float, y1: float, t: float) -> tuple[float, float]:
    a, b, c = (1 - t) * (1 - t), 2 * t * (1 - t), t * t
    return a * x0 + b * cx + c * x1, a * y0 + b * cy + c * y1


def _field(segments: list[Segment], signed: bool) -> Floats:
    line = np.arange(FIELD, dtype=np.float64) * STEP + LOW
    x, y = line[None, :], line[:, None]
    nearest = np.full((FIELD, FIELD), np.inf)
    inside = np.zeros((FIELD, FIELD), bool)
    for x0, y0, x1, y1 in segments:
        dx, dy = x1 - x0, y1 - y0
        along = np.clip(((x - x0) * dx + (y - y0) * dy) / (dx * dx + dy * dy), 0.0, 1.0)
        ex, ey = x - x0 - along * dx, y - y0 - along * dy
        nearest = np.minimum(nearest, ex * ex + ey * ey)
        if dy != 0:  # a ray to the right crosses the piece: even-odd rule
            crosses = ((y0 > y) != (y1 > y)) & (x < (y - y0) * dx / dy + x0)
            inside ^= crosses
    distance = np.sqrt(nearest)
    field: Floats = np.where(inside & signed, -distance, distance).astype(np.float32)
    return field
