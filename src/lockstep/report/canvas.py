"""What the plots of papers are drawn on: an SVG text, or a PNG picture by Pillow. The colours are the page's own, those on white."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from html import escape
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Protocol

Point = tuple[float, float]
Anchor = Literal["start", "middle", "end"]
DASH = (6.0, 4.0)
# Where Linux and macOS keep a font with µ and ×; Pillow's own is taken where there is none.
FONTS = (
    "/usr/share/fonts/truetype/dejavu/DejaVuSans.ttf",
    "/usr/share/fonts/dejavu-sans-fonts/DejaVuSans.ttf",
    "/usr/share/fonts/TTF/DejaVuSans.ttf",
    "/usr/share/fonts/truetype/liberation/LiberationSans-Regular.ttf",
    "/System/Library/Fonts/Helvetica.ttc",
)
# What Pillow's own font lacks.
PLAIN = str.maketrans({"µ": "u", "×": "x", "–": "-", "−": "-"})
# PNG files have twice the pixels of the plot, drawn twice as large again and made smaller: that smooths the edges.
DOTS, FINER = 2, 2


@cache
def colours() -> dict[str, str]:
    """By name, from the light half of the page's style."""
    style = files("lockstep.report").joinpath("page", "page.css").read_text(encoding="utf-8")
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", style.partition("}")[0]))


@cache
def font(size: float) -> Any:
    from PIL import ImageFont

    path = font_file()
    return ImageFont.truetype(path, size) if path else ImageFont.load_default(size)


@cache
def font_file() -> str | None:
    return next((path for path in FONTS if Path(path).is_file()), None)


def text_width(text: str, size: float = 12) -> float:
    return float(font(100).getlength(text)) * size / 100


class Canvas(Protocol):
    def line(self, points: Sequence[Point], colour: str, width: float = 1.0, dash: bool = False) -> None: ...

    def area(self, points: Sequence[Point], colour: str, opacity: float = 1.0) -> None: ...

    def circle(self, at: Point, radius: float, colour: str, opacity: float = 1.0) -> None: ...

    def text(
        self, at: Point, text: str, colour: str = "ink", size: float = 12, anchor: Anchor = "start", bold: bool = False
    ) -> None: ...


class Svg:
    """Collects elements; `finish` gives the file."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    def line(self, points: Sequence[Point], colour: str, width: float = 1.0, dash: bool = False) -> None:
        dashed = f' stroke-dasharray="{DASH[0]:g} {DASH[1]:g}"' if dash else ""
        path = "M" + "L".join(_at(point) for point in points)
        self._parts.append(
            f'<path d="{path}" fill="none" stroke="{colours()[colour]}" stroke-width="{width:g}"{dashed}/>'
        )

    def area(self, points: Sequence[Point], colour: str, opacity: float = 1.0) -> None:
        path = "M" + "L".join(_at(point) for point in points) + "Z"
        self._parts.append(f'<path d="{path}" fill="{colours()[colour]}"{_faint(opacity)}/>')

    def circle(self, at: Point, radius: float, colour: str, opacity: float = 1.0) -> None:
        fill = colours()[colour]
        self._parts.append(
            f'<circle cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="{radius:.1f}" fill="{fill}"{_faint(opacity)}/>'
        )

    def text(
        self, at: Point, text: str, colour: str = "ink", size: float = 12, anchor: Anchor = "start", bold: bool = False
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        where = (
            f'x="{at[0]:.1f}" y="{at[1]:.1f}" text-anchor="{anchor}" font-size="{size:g}" fill="{colours()[colour]}"'
        )
        self._parts.append(f"<text {where}{weight}>{escape(text)}</text>")

    def finish(self, width: float, height: float) -> str:
        size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="Helvetica, Arial, DejaVu Sans, sans-serif">'
            f'<rect width="100%" height="100%" fill="#ffffff"/>{"".join(self._parts)}</svg>\n'
        )


def _at(point: Point) -> str:
    return f"{point[0]:.1f} {point[1]:.1f}"


def _faint(opacity: float) -> str:
    return f' fill-opacity="{opacity:g}"' if opacity < 1 else ""


class Png:
    """Draws with Pillow. The height must be known before, so plots are drawn once on Svg to find it."""

    def __init__(self, width: float, height: float) -> None:
        from PIL import Image, ImageDraw

        self._scale = DOTS * FINER
        self._size = (round(width), round(height))
        self._image = Image.new("RGB", (self._size[0] * self._scale, self._size[1] * self._scale), "#ffffff")
        self._draw = ImageDraw.Draw(self._image, "RGBA")

    def _points(self, points: Sequence[Point]) -> list[Point]:
        return [(x * self._scale, y * self._scale) for x, y in points]

    def line(self, points: Sequence[Point], colour: str, width: float = 1.0, dash: bool = False) -> None:
        for piece in dashes(points) if dash else [list(points)]:
            self._draw.line(
                self._points(piece), fill=colours()[colour], width=max(1, round(width * self._scale)), joint="curve"
            )

    def area(self, points: Sequence[Point], colour: str, opacity: float = 1.0) -> None:
        if len(points) > 2:
            self._draw.polygon(self._points(points), fill=_rgba(colour, opacity))

    def circle(self, at: Point, radius: float, colour: str, opacity: float = 1.0) -> None:
        x, y, r = (value * self._scale for value in (*at, radius))
        self._draw.ellipse((x - r, y - r, x + r, y + r), fill=_rgba(colour, opacity))

    def text(
        self, at: Point, text: str, colour: str = "ink", size: float = 12, anchor: Anchor = "start", bold: bool = False
    ) -> None:
        place = {"start": "ls", "middle": "ms", "end": "rs"}[anchor]
        x, y = at[0] * self._scale, at[1] * self._scale
        text = text if font_file() else text.translate(PLAIN)
        heavy = self._scale // 4 if bold else 0
        fill = colours()[colour]
        self._draw.text(
            (x, y), text, fill=fill, font=font(size * self._scale), anchor=place, stroke_width=heavy, stroke_fill=fill
        )

    def save(self, path: Path) -> None:
        from PIL import Image

        size = (self._size[0] * DOTS, self._size[1] * DOTS)
        self._image.resize(size, Image.Resampling.LANCZOS).save(path, "PNG")


def _rgba(colour: str, opacity: float) -> tuple[int, int, int, int]:
    code = colours()[colour]
    return int(code[1:3], 16), int(code[3:5], 16), int(code[5:7], 16), round(255 * opacity)


def dashes(points: Sequence[Point]) -> list[list[Point]]:
    """The drawn pieces of a dashed line."""
    found: list[list[Point]] = []
    left, drawn = DASH[0], True
    for (x0, y0), (x1, y1) in pairwise(points):
        length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
        at = 0.0
        while at < length:
            part = min(left, length - at)
            if drawn:
                ends = [(x0 + (x1 - x0) * t / length, y0 + (y1 - y0) * t / length) for t in (at, at + part)]
                found.append(ends)
            at, left = at + part, left - part
            if left <= 1e-9:
                drawn = not drawn
                left = DASH[0] if drawn else DASH[1]
    return found
