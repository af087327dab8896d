"""Latency over message size, both logarithmic: as text for the terminal and as an SVG file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from lockstep.comms.cells import Cell

MARKS = {"gloo": "●", "mpi": "▲", "shm": "■", "nccl": "◆"}
COLOURS = {"gloo": "#0072b2", "mpi": "#d55e00", "shm": "#009e73", "nccl": "#cc79a7"}
Points = dict[str, list[tuple[float, float]]]
"""Of each backend: (bytes, microseconds)."""


def series(cells: Sequence[Cell], collective: str, ranks: int) -> Points:
    found: Points = {}
    for cell in cells:
        if cell.collective == collective and cell.ranks == ranks and cell.state == "ok" and cell.median_us:
            found.setdefault(cell.backend, []).append((cell.message_bytes, cell.median_us))
    return {backend: sorted(points) for backend, points in found.items()}


def terminal(points: Points, title: str, width: int = 60, height: int = 14) -> str:
    """A chart of characters; where two backends meet, the later one shows."""
    low_x, high_x, low_y, high_y = _bounds(points)
    grid = [[" "] * width for _ in range(height)]
    for backend, line in points.items():
        for size, time in line:
            x = round(_share(size, low_x, high_x) * (width - 1))
            y = round(_share(time, low_y, high_y) * (height - 1))
            grid[height - 1 - y][x] = MARKS.get(backend, "○")
    labels = {
        height - 1 - round(_share(t, low_y, high_y) * (height - 1)): short_time(t) for t in _decades(low_y, high_y)
    }
    rows = [f"{labels.get(row, ''):>8} ┤{''.join(cells)}".rstrip() for row, cells in enumerate(grid)]
    legend = "  ".join(f"{MARKS.get(backend, '○')} {backend}" for backend in points)
    left, right = short_bytes(low_x), short_bytes(high_x)
    bottom = f"{'':>8} └{'─' * width}\n{'':>10}{left}{right:>{width - len(left)}}"
    return "\n".join([f"{title}   {legend}", *rows, bottom])


def svg(panels: Sequence[tuple[str, Points]], caption: str) -> str:
    """All panels in rows of three."""
    wide, high, columns = 330, 230, 3
    rows = -(-len(panels) // columns)
    width, height = wide * min(columns, len(panels)) + 10, high * rows + 50
    body = [
        _panel(title, points, (i % columns) * wide, (i // columns) * high + 25)
        for i, (title, points) in enumerate(panels)
    ]
    names = list(dict.fromkeys(name for _, points in panels for name in points))
    legend = "".join(
        f'<circle cx="{60 + 80 * i}" cy="12" r="4" fill="{COLOURS.get(n, "#555")}"/><text x="{68 + 80 * i}" y="16">{escape(n)}</text>'
        for i, n in enumerate(names)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>{legend}'
        f'{"".join(body)}<text x="10" y="{height - 8}" fill="#555">{escape(caption)}</text></svg>\n'
    )


def _panel(title: str, points: Points, left: float, top: float) -> str:
    x0, y0, w, h = left + 55, top + 20, 260, 165
    low_x, high_x, low_y, high_y = _bounds(points)

    def at(size: float, time: float) -> tuple[float, float]:
        return x0 + _share(size, low_x, high_x) * w, y0 + h - _share(time, low_y, high_y) * h

    parts = [f'<text x="{x0}" y="{top + 12}" font-weight="bold">{escape(title)}</text>']
    for time in _decades(low_y, high_y):
        _, y = at(low_x, time)
        parts.append(f'<path d="M{x0} {y:.1f}h{w}" stroke="#ddd"/>')
        parts.append(f'<text x="{x0 - 4}" y="{y + 4:.1f}" text-anchor="end">{short_time(time)}</text>')
    for size, anchor in ((low_x, "start"), (high_x, "end")):
        x, _ = at(size, low_y)
        parts.append(f'<text x="{x:.1f}" y="{y0 + h + 14}" text-anchor="{anchor}">{short_bytes(size)}</text>')
    parts.append(f'<path d="M{x0} {y0}v{h}h{w}" fill="none" stroke="#333"/>')
    for backend, line in points.items():
        colour = COLOURS.get(backend, "#555")
        corners = [at(*point) for point in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in corners]
    return "".join(parts)


def _bounds(points: Points) -> tuple[float, float, float, float]:
    """Sizes as they are, times to whole decades."""
    sizes = [size for line in points.values() for size, _ in line]
    times = [time for line in points.values() for _, time in line]
    low, high = 10 ** math.floor(math.log10(min(times))), 10 ** math.ceil(math.log10(max(times)))
    return min(sizes), max(sizes), low, high if high > low else low * 10


def _share(value: float, low: float, high: float) -> float:
    """Where a value lies between two others on a logarithmic axis; a single size lies in the middle."""
    return math.log(value / low) / math.log(high / low) if high > low else 0.5


def _decades(low: float, high: float) -> list[float]:
    return [10**k for k in range(round(math.log10(low)), round(math.log10(high)) + 1)]


def short_time(microseconds: float) -> str:
    if microseconds >= 1e6:
        return f"{microseconds / 1e6:g} s"
    return f"{microseconds / 1e3:g} ms" if microseconds >= 1e3 else f"{microseconds:g} µs"


def short_bytes(size: float) -> str:
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:g} {unit}" if size % factor == 0 else f"{size / factor:.1f} {unit}"
    return f"{size:g} B"
