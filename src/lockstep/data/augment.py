"""Random changes of training images, on the whole batch at once, drawn by the key of each sample.

The order is fixed: jitter; then crop, flip and rotation as one; then cutout. Each step computes an image from that image alone,
with operations whose bits do not depend on what else is in the batch, so any division of a batch gives the same images.
What happens to which image is decided first, for many samples at once and by numpy, whose calls cost a fraction of torch's;
the work on the pixels of a batch is then a dozen calls.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from lockstep.keyed import Stream, uniform
from lockstep.recipe import Augment

Array = NDArray[Any]

GREY = 127.5
# How much of each colour goes into the brightness of a pixel (ITU-R BT.601), as in PIL.
LUMA = (0.299, 0.587, 0.114)
# Up to this many pixels, sums of bytes are whole numbers below 2^24: exact in float32, whatever the order of adding.
EXACT_SUM = 2**24 // 255


class Decisions(NamedTuple):
    """What is to be done to each of some images, in the order of the images; None where the recipe does not ask for it."""

    jitter: tuple[Tensor, Tensor] | None
    move: tuple[Tensor, Tensor] | None
    turn: tuple[Tensor, Tensor] | None
    cutout: tuple[Tensor, Tensor] | None

    def of(self, part: slice) -> Decisions:
        return Decisions(*(None if pair is None else (pair[0][part], pair[1][part]) for pair in self))


class Augmenter:
    """The recipe's augmentation of images of one shape."""

    def __init__(self, settings: Augment, shape: tuple[int, int, int], device: torch.device) -> None:
        self._settings, self._shape, self._device = settings, shape, device

    def decide(self, keys: Tensor) -> Decisions:
        """Draw for each key. A sample's draws do not depend on which of the techniques are used."""
        settings, shape = self._settings, self._shape
        draws = uniform(keys.cpu(), Stream.AUGMENT, 9).double().numpy()
        offset, side, light, angle, square = np.split(draws, (2, 3, 6, 7), axis=1)
        shift = (offset * (2 * settings.crop + 1)).astype(np.int64) - settings.crop
        flipped = side < (0.5 if settings.flip else 0.0)
        moved = (settings.crop or settings.flip) and not settings.rotation
        return Decisions(
            jitter=self._pair(*colours(1 + settings.jitter * (2 * light - 1), shape)) if settings.jitter else None,
            move=self._pair(*windows(shift, flipped, settings.crop, shape)) if moved else None,
            turn=self._pair(*turns(shift, flipped, settings.rotation * (2 * angle - 1), shape))
            if settings.rotation
            else None,
            cutout=self._pair(*squares(square, settings.cutout, shape)) if settings.cutout else None,
        )

    def __call__(self, images: Tensor, decisions: Decisions) -> Tensor:
        """Bytes (N, C, H, W) go in; bytes, or float32 from 0 to 255, come out."""
        if decisions.jitter is not None:
            images = recolour(images, *decisions.jitter)
        if decisions.move is not None:
            images = move(images, *decisions.move, self._settings.crop)
        if decisions.turn is not None:
            images = turn(images, *decisions.turn)
        if decisions.cutout is not None:
            images = cut_out(images, *decisions.cutout)
        return images

    def _pair(self, first: Array, second: Array) -> tuple[Tensor, Tensor]:
        one, two = (
            torch.from_numpy(array if array.dtype == np.int64 else array.astype(np.float32, copy=False))
            for array in (first, second)
        )
        return one.to(self._device), two.to(self._device)


def colours(factors: Array, shape: tuple[int, int, int]) -> tuple[Array, Array]:
    """Brightness b, contrast c and saturation s (the columns of `factors`) in this order, as one map of colours.

    With y the brightness of a pixel and m its mean over the image: x becomes b x; then c x + (1 - c) m; then
    s x + (1 - s) y. Nothing is cut off in between, so all of it is s c b x + (1 - s) c b y + (1 - c) b m. Returns the factor
    of x, and beside each other those of y and m. Without three colours the saturation does nothing.
    """
    bright, contrast, colour = factors.T[:, :, None]
    both = bright * contrast
    kept = both * colour if shape[0] == 3 else both
    return kept, np.concatenate((both - kept, bright - both), axis=1)


def recolour(images: Tensor, own: Tensor, grey: Tensor) -> Tensor:
    """Apply such a map; what leaves 0..255 is cut off.

    Every operation is one product or one sum of two numbers, rounded once as IEEE 754 says, in an order that is written here.
    So an image gets the same bits in any batch on any processor. A matrix product would promise neither: BLAS chooses its
    order, and whether it rounds in between, by the processor and by the number of images.
    """
    values = images.to(torch.float32)
    channels, height, width = values.shape[1:]
    luma = LUMA if channels == 3 else (1 / channels,) * channels
    exact = torch.float32 if height * width <= EXACT_SUM else torch.float64
    means = values.sum((2, 3), keepdim=True, dtype=exact).to(torch.float32).mul_(1 / (height * width))
    of_pixel, of_image = grey[:, :1, None, None], grey[:, 1:, None, None]
    level = _brightness(means, luma).mul_(of_image)
    if channels == 3:
        level = _brightness(values, luma).mul_(of_pixel).add_(level)
    return values.mul(own[:, :, None, None]).add_(level).clamp_(0, 255)


def _brightness(values: Tensor, luma: tuple[float, ...]) -> Tensor:
    """The colours of each pixel, weighted and added from the first to the last."""
    total = values[:, :1] * luma[0]
    for channel, weight in enumerate(luma[1:], 1):
        total.add_(values[:, channel : channel + 1] * weight)
    return total


def windows(shift: Array, flipped: Array, padding: int, shape: tuple[int, int, int]) -> tuple[Array, Array]:
    """Crop and flip: where each row of the result begins in the padded image, and which columns it takes from there.

    The window is shifted by (down, right); padding is black.
    """
    _, height, width = shape
    rows = np.arange(padding, padding + height) + shift[:, :1]
    columns = np.arange(padding, padding + width)
    return rows * (width + 2 * padding), np.where(flipped, columns[::-1], columns) + shift[:, 1:]


def move(images: Tensor, rows: Tensor, columns: Tensor, padding: int) -> Tensor:
    """No pixel changes its value, so bytes stay bytes: a quarter of the memory of floats."""
    count, channels, height, width = images.shape
    if padding:
        images = functional.pad(images, (padding, padding, padding, padding))
    positions = (rows[:, :, None] + columns[:, None, :]).view(count, 1, -1).expand(-1, channels, -1)
    return images.reshape(count, channels, -1).gather(2, positions).view(count, channels, height, width)


def turns(shift: Array, flipped: Array, degrees: Array, shape: tuple[int, int, int]) -> tuple[Array, Array]:
    """Crop, flip and rotation in one: the window is turned about its centre, counter-clockwise where degrees are positive.

    Pixel (x, y) comes from the sum of the x-th of the first and the y-th of the second, both (N, 2, …), counted from the
    centre in the units of grid_sample: half of width and height.
    """
    _, height, width = shape
    cosine, sine, mirror = np.cos(np.radians(degrees)), np.sin(np.radians(degrees)), np.where(flipped, -1.0, 1.0)
    units = np.array((2 / width, 2 / height))
    by_x, by_y, start = (
        part.astype(np.float32)[:, :, None, None]
        for part in (
            np.concatenate((mirror * cosine, sine), 1) * units,
            np.concatenate((-mirror * sine, cosine), 1) * units,
            shift[:, ::-1] * units,
        )
    )
    return by_x * _centred(width) + start, by_y * _centred(height)[:, None]


def turn(images: Tensor, along: Tensor, across: Tensor) -> Tensor:
    """Each pixel is blended from the four around the position it comes from (bilinear); outside the image all is black.

    What a turned window shows of the image beyond the straight one is kept, where one step after the other would lose it.
    """
    # Two planes, of x and of y, seen as pairs: grid_sample reads planes faster than pairs.
    positions = (along + across).permute(0, 2, 3, 1)
    return functional.grid_sample(images.to(torch.float32), positions, align_corners=False)


def squares(draws: Array, size: int, shape: tuple[int, int, int]) -> tuple[Array, Array]:
    """A square of `size` pixels, its centre anywhere in the image (at the border, part of it lies outside): its rows and columns."""
    sides = shape[1:]
    start = (draws * sides).astype(np.int64) - size // 2
    rows, columns = (np.arange(side) - start[:, axis : axis + 1] for axis, side in enumerate(sides))
    return (rows >= 0) & (rows < size), (columns >= 0) & (columns < size)


def cut_out(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Make the square grey."""
    square = rows[:, None, :, None] * columns[:, None, None, :]
    # Times 1 and plus 0 outside, times 0 and plus grey inside: exact, and faster than filling by a mask.
    return images.to(torch.float32).mul_(1 - square).add_(square.mul_(GREY))


def _centred(size: int) -> Array:
    return np.arange(size, dtype=np.float32) - np.float32((size - 1) / 2)
