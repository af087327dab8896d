"""Plots as files, drawn by vl_convert: no browser is needed."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.report.vega.spec import with_data
from lockstep.report.views import AnyChart
from lockstep.text import printable

# PNG files have twice the dots of the plot.
DOTS = 2
_SIZE = re.compile(r'<svg [^>]*?width="([\d.]+)" height="([\d.]+)"')


def svg(chart: AnyChart) -> str:
    import vl_convert

    return str(vl_convert.vegalite_to_svg(_printable(with_data(chart))))


def _printable(value: Any) -> Any:
    """A control character in a name is no XML, and makes vl_convert end the whole process."""
    if isinstance(value, dict):
        return {key: _printable(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_printable(each) for each in value]
    return printable(value) if isinstance(value, str) else value


def panels(charts: Sequence[AnyChart], caption: str, columns: int = 2) -> str:
    """Charts beside each other in one SVG, with a line below them."""
    drawn = [svg(chart) for chart in charts]
    sizes = [[float(size) for size in _SIZE.search(text).groups()] for text in drawn]  # type: ignore[union-attr]
    wide, high = max(width for width, _ in sizes), max(height for _, height in sizes)
    body = []
    for number, text in enumerate(drawn):
        # Each has clips of its own, by names that all of them use.
        own = re.sub(r'(\bid="|url\(#)', rf"\g<1>panel{number}-", text)
        body.append(own.replace("<svg ", f'<svg x="{number % columns * wide}" y="{number // columns * high}" ', 1))
    width, height = wide * min(columns, len(drawn)), high * -(-len(drawn) // columns) + 24
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="11"><rect width="100%" height="100%" fill="white"/>{"".join(body)}<text x="8" y="{height - 8}" fill="#555">'
        f"{html.escape(caption)}</text></svg>\n"
    )


def pdf(chart: AnyChart) -> bytes:
    import vl_convert

    return bytes(vl_convert.vegalite_to_pdf(_printable(with_data(chart))))


def png(chart: AnyChart, path: Path) -> None:
    import vl_convert

    path.write_bytes(vl_convert.vegalite_to_png(_printable(with_data(chart)), scale=DOTS))
