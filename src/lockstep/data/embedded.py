"""The embedded sets: drawn here, so they need no network, no file and no licence of others.

Every image is the same on every machine: random numbers are the raw stream of PCG64 (which numpy
guarantees), and the arithmetic is one elementwise operation at a time (which IEEE 754 guarantees), without
sums, products of matrices, sines or anything else whose last bit depends on the processor. Image k of a
split does not depend on the size of the set, so `embedded@1000` is the beginning of `embedded@60000`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.data.glyphs import DIGITS, FIELD, LOW, SHAPES, STEP, distance_fields

EDITION = 1  # raise it when an image changes: cached sets of another edition are drawn again
SEED = 20_240_229
_BLOCK = 500  # images drawn at once: few enough for the arrays to stay in the cache of a core

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Style:
    """How a set is drawn: which glyphs, and how far they are distorted."""

    side: int
    colours: int
    turn: float  # tangent of half the largest angle
    stretch: tuple[float, float]  # pixels become glyph units: smallest and largest
    slant: float
    shift: float  # in glyph units
    bend: float
    ink: tuple[float, float]  # threshold in the distance field: half the width of a stroke
    noise: float
    stroke: float = 0.0  # half the width of a line that has nothing to do with the class


_STYLES = {
    "embedded": Style(28, 1, 0.16, (3.9, 5.6), 0.28, 13.0, 8.0, (3.4, 8.0), 32.0, 2.6),
    "embedded-color": Style(32, 3, 0.16, (3.3, 4.8), 0.15, 12.0, 5.0, (-2.0, 4.0), 24.0, 2.0),
}


def draw(name: str, split: str, count: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The first `count` images and labels of a split of an embedded set."""
    style = _STYLES[name]
    outlines = name == "embedded-color"
    fields, starts = distance_fields(SHAPES if outlines else DIGITS, signed=outlines)
    images = np.empty((count, style.colours, style.side, style.side), np.uint8)
    labels = np.empty(count, np.uint8)
    for block, start in enumerate(range(0, count, _BLOCK)):
        stop = min(start + _BLOCK, count)
        dice = Dice((SEED, style.colours, split == "test", block))
        drawn, kinds = _draw_block(style, fields, starts, dice)
        images[start:stop], labels[start:stop] = drawn[: stop - start], kinds[: stop - start]
    return images, labels


class Dice:
    """Uniform numbers from the raw stream of PCG64, 24 bits each, so that they are exact in float32."""

    def __init__(self, key: tuple[int, ...]) -> None:
        self._bits = np.random.PCG64(np.random.SeedSequence([int(number) for number in key]))

    def raw(self, count: int) -> NDArray[np.uint64]:
        return np.asarray(self._bits.random_raw(count), np.uint64)

    def uniform(self, low: float, high: float, *shape: int) -> Floats:
        count = int(np.prod(shape))
        unit = (self.raw(count) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
        return (unit * np.float32(high - low) + np.float32(low)).reshape(shape)

    def octets(self, *shape: int) -> NDArray[np.uint8]:
        """Bytes, eight from each number, in the same order on machines of either byte order."""
        count = int(np.prod(shape))
        return self.raw(-(-count // 8)).astype("<u8").view(np.uint8)[:count].reshape(shape)


def _draw_block(
    style: Style, fields: Floats, starts: list[list[int]], dice: Dice
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """A whole block: always all of it, so that an image does not depend on how many are wanted."""
    labels = (np.argsort(dice.raw(_BLOCK), kind="stable") % len(starts)).astype(np.uint8)
    picks = dice.raw(_BLOCK) >> np.uint64(32)
    glyphs = np.array(
        [starts[label][int(pick) % len(starts[label])] for label, pick in zip(labels, picks, strict=True)]
    )
    x, y = _warp(style, dice)
    distance = _look_up(fields, glyphs, x, y)
    ink = _soft(dice.uniform(*style.ink, _BLOCK, 1, 1) - distance, x.shape)
    stray = _soft(np.float32(style.stroke) - _stray_line(style, dice), x.shape)
    if style.colours == 1:
        return _grey(style, ink, stray, dice)[:, None], labels
    return _coloured(style, ink, stray, dice), labels


def _warp(style: Style, dice: Dice) -> tuple[Floats, Floats]:
    """Where in the glyph each pixel looks: turned, stretched, slanted, shifted and bent, per image."""
    one = np.float32(1)
    half = np.float32((style.side - 1) / 2)
    line = np.arange(style.side, dtype=np.float32) - half
    u, v = line[None, None, :], line[None, :, None]
    t = dice.uniform(-style.turn, style.turn, _BLOCK, 1, 1)
    # Cosine and sine from the tangent of half the angle: exact arithmetic where a sine would not be.
    cosine, sine = (one - t * t) / (one + t * t), (t + t) / (one + t * t)
    wide, tall = (dice.uniform(*style.stretch, _BLOCK, 1, 1) for _ in range(2))
    slant = dice.uniform(-style.slant, style.slant, _BLOCK, 1, 1)
    x = (u * cosine + v * sine) * wide
    y = (v * cosine - u * sine) * tall
    x = x + y * slant + dice.uniform(-style.shift, style.shift, _BLOCK, 1, 1) + np.float32(50)
    y = y + dice.uniform(-style.shift, style.shift, _BLOCK, 1, 1) + np.float32(50)
    return x + _bend(style, dice), y + _bend(style, dice)


def _bend(style: Style, dice: Dice) -> Floats:
    """A smooth random displacement: a coarse grid of numbers, spread over the pixels by straight lines."""
    knots = dice.uniform(-style.bend, style.bend, _BLOCK, 4, 4)
    position = np.arange(style.side, dtype=np.float32) * np.float32(3) / np.float32(style.side - 1)
    lower = np.minimum(position.astype(np.int64), 2)
    part = position - lower.astype(np.float32)
    rows = knots[:, lower] + (knots[:, lower + 1] - knots[:, lower]) * part[None, :, None]
    result: Floats = rows[:, :, lower] + (rows[:, :, lower + 1] - rows[:, :, lower]) * part[None, None, :]
    return result


def _look_up(fields: Floats, glyphs: NDArray[Any], x: Floats, y: Floats) -> Floats:
    """The distance to the glyph at (x, y), between the points of the field by straight lines."""
    most = np.float32(FIELD - 1.001)
    column = np.clip((x - np.float32(LOW)) / np.float32(STEP), np.float32(0), most)
    row = np.clip((y - np.float32(LOW)) / np.float32(STEP), np.float32(0), most)
    i, j = row.astype(np.int32), column.astype(np.int32)
    down, right = row - i.astype(np.float32), column - j.astype(np.float32)
    index = glyphs.astype(np.int32)[:, None, None] * np.int32(FIELD * FIELD) + i * np.int32(FIELD) + j
    flat = fields.reshape(-1)
    upper = flat[index]
    upper = upper + (flat[index + 1] - upper) * right
    index = index + np.int32(FIELD)
    lower = flat[index]
    lower = lower + (flat[index + 1] - lower) * right
    result: Floats = upper + (lower - upper) * down
    return result


def _stray_line(style: Style, dice: Dice) -> Floats:
    """The distance, in glyph units, of each pixel to a short line somewhere in the image."""
    line = np.arange(style.side, dtype=np.float32) * np.float32(100 / style.side)
    x0, y0 = (dice.uniform(0, 100, _BLOCK, 1, 1) for _ in range(2))
    dx, dy = (dice.uniform(-40, 40, _BLOCK, 1, 1) for _ in range(2))
    px, py = line[None, None, :] - x0, line[None, :, None] - y0
    along = np.clip((px * dx + py * dy) / (dx * dx + dy * dy + np.float32(1)), np.float32(0), np.float32(1))
    ex, ey = px - along * dx, py - along * dy
    result: Floats = np.sqrt(ex * ex + ey * ey)
    return result


def _soft(depth: Floats, shape: tuple[int, ...]) -> Floats:
    """Ink from 0 to 1 with an edge about a pixel wide."""
    ink: Floats = np.clip(depth * np.float32(0.25) + np.float32(0.5), np.float32(0), np.float32(1))
    return np.broadcast_to(ink, shape)


def _noise(style: Style, dice: Dice, *shape: int) -> Floats:
    """Grain around zero: two bytes added, so that small values are the usual ones."""
    pair = dice.octets(2, *shape).astype(np.float32)
    result: Floats = (pair[0] + pair[1] - np.float32(255)) * np.float32(style.noise / 255)
    return result


def _grey(style: Style, ink: Floats, stray: Floats, dice: Dice) -> NDArray[np.uint8]:
    paper = dice.uniform(0, 60, _BLOCK, 1, 1)
    strength = dice.uniform(90, 195, _BLOCK, 1, 1)
    faint = strength * dice.uniform(0.3, 0.9, _BLOCK, 1, 1)
    value = paper + np.maximum(ink * strength, stray * faint) + _noise(style, dice, *ink.shape)
    return _to_bytes(value)


def _coloured(style: Style, ink: Floats, stray: Floats, dice: Dice) -> NDArray[np.uint8]:
    """A bright colour on a darker one, with a slope of light; the class says nothing about either."""
    paper = dice.uniform(0, 120, _BLOCK, 3, 1, 1)
    colour = paper + dice.uniform(50, 135, _BLOCK, 3, 1, 1)
    line = np.arange(style.side, dtype=np.float32) / np.float32(style.side) - np.float32(0.5)
    slope_x, slope_y = (dice.uniform(-60, 60, _BLOCK, 1, 1, 1) for _ in range(2))
    light = line[None, None, None, :] * slope_x + line[None, None, :, None] * slope_y
    other = dice.uniform(0, 256, _BLOCK, 3, 1, 1)
    ink4, stray4 = ink[:, None], stray[:, None]
    value = paper + (colour - paper) * ink4
    value = value + (other - value) * stray4
    return _to_bytes(value + light + _noise(style, dice, _BLOCK, 3, style.side, style.side))


def _to_bytes(value: Floats) -> NDArray[np.uint8]:
    return np.clip(value, np.float32(0), np.float32(255)).astype(np.uint8)
