"""Images of a data set as a grid: in colour or in letters on a terminal, or as a PNG file with labels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import InputError

_SHADES = " .:-=+*#%@"
Pixels = NDArray[np.uint8]


def as_text(images: Pixels, labels: Sequence[str], width: int, colour: bool) -> str:
    """A grid that fits into `width` columns of a terminal, with the label above every image."""
    # Small images at full size if four of them fit side by side, else at half or a third of it.
    side = images.shape[3]
    shrink = next((step for step in (1, 2, 3) if 4 * (side // step + 1) <= width), 3)
    small = _shrink(images, shrink)
    cell = small.shape[2]
    across = max(1, (width + 1) // (cell + 1))
    lines: list[str] = []
    for start in range(0, len(small), across):
        row = small[start : start + across]
        heads = [label[:cell].ljust(cell) for label in labels[start : start + across]]
        drawn = [_blocks(image) if colour else _letters(image) for image in row]
        lines += [" ".join(heads).rstrip(), *(" ".join(parts) for parts in zip(*drawn, strict=True)), ""]
    return "\n".join(lines)


def save_png(path: Path, images: Pixels, labels: Sequence[str]) -> None:
    """A grid of about eight images in a row, twice their size, with the label under every image."""
    from PIL import Image, ImageDraw

    across = min(8, len(images))
    scale = 2 if images.shape[3] >= 16 else 6
    height, width = images.shape[2] * scale, images.shape[3] * scale
    cell_w, cell_h = max(width, 72) + 6, height + 18
    rows = -(-len(images) // across)
    sheet = Image.new("RGB", (across * cell_w + 6, rows * cell_h + 6), "white")
    pen = ImageDraw.Draw(sheet)
    for number, (image, label) in enumerate(zip(_rgb(images), labels, strict=True)):
        x, y = 6 + number % across * cell_w, 6 + number // across * cell_h
        sheet.paste(Image.fromarray(image).resize((width, height), Image.Resampling.NEAREST), (x, y))
        pen.text((x, y + height + 2), label[:12], fill="black")
    try:
        sheet.save(path, format="PNG")
    except OSError as error:
        raise InputError(f"-o {path}: cannot be written: {error.strerror or error}") from None


def _rgb(images: Pixels) -> Pixels:
    """Height, width, three colours; images with another number of channels show their first as grey."""
    chosen = images if images.shape[1] == 3 else np.repeat(images[:, :1], 3, axis=1)
    return np.ascontiguousarray(chosen.transpose(0, 2, 3, 1))


def _shrink(images: Pixels, step: int) -> Pixels:
    """Colour images reduced by averaging squares of `step` pixels; an edge that fills none is left out."""
    pixels = _rgb(images)
    count, height, width, _ = pixels.shape
    rows, columns = max(1, height // step), max(1, width // step)
    if step == 1 or height < step or width < step:
        return pixels
    squares = pixels[:, : rows * step, : columns * step].reshape(count, rows, step, columns, step, 3)
    small: Pixels = squares.mean(axis=(2, 4)).astype(np.uint8)
    return small


def _blocks(image: Pixels) -> list[str]:
    """Two pixels per character: the upper one is the colour of a half block, the lower one its ground."""
    if len(image) % 2:
        image = np.concatenate([image, np.zeros_like(image[:1])])
    lines = []
    for upper, lower in zip(image[::2].tolist(), image[1::2].tolist(), strict=True):
        cells = [
            f"\x1b[38;2;{a[0]};{a[1]};{a[2]};48;2;{b[0]};{b[1]};{b[2]}m▀" for a, b in zip(upper, lower, strict=True)
        ]
        lines.append("".join(cells) + "\x1b[0m")
    return lines


def _letters(image: Pixels) -> list[str]:
    """One letter for two pixels, one above the other, since letters are about twice as high as wide."""
    grey = image.mean(axis=2)
    if len(grey) % 2:
        grey = np.concatenate([grey, grey[-1:]])
    pairs = grey.reshape(-1, 2, grey.shape[1]).mean(axis=1)
    spread = max(1.0, float(pairs.max() - pairs.min()))
    level = ((pairs - pairs.min()) / spread * (len(_SHADES) - 1)).astype(int)
    return ["".join(_SHADES[value] for value in line) for line in level.tolist()]
