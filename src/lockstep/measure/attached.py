"""What only attached commands have: the named parts of a step's "other", the sizes of gradients, and what the script itself has logged
(inside/layout.py)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lockstep import shapes
from lockstep.inside.gradients import FILE as GRADIENTS_FILE
from lockstep.inside.layout import BESIDE, BESIDE_FILE, LOGGED_FILE
from lockstep.measure.phases import Rows
from lockstep.reading import Damaged, read_file, read_record, read_records

ROW = np.dtype([*((f"{name}_ns", "<i8") for name in BESIDE), ("reads", "<i8")])


class Logged(NamedTuple):
    """One name that the script has logged values under, by the optimizer's steps."""

    name: str
    steps: list[int]
    values: list[float]
    times: list[float]


def read_beside(folder: Path) -> Rows:
    """One row per step of a rank, as long as its steps.bin or longer; empty where there is none."""
    try:
        data = read_file(folder / BESIDE_FILE) or b""
    except Damaged:
        data = b""
    return np.frombuffer(data[: len(data) - len(data) % ROW.itemsize], dtype=ROW)


def beside(steps: Sequence[Rows], rows: Sequence[Rows]) -> dict[str, float]:
    """Mean seconds of each named part over the ranks' steps after warm-up, and how many values a step reads; empty where nothing is known."""
    found = []
    for of_rank, named in zip(steps, rows, strict=True):
        if not len(of_rank) or len(named) < len(of_rank):
            return {}
        kept = of_rank["warmup"] == 0
        found.append(named[: len(of_rank)][kept if kept.any() else ~kept])
    means = {name: float(np.mean([rank[f"{name}_ns"].mean() for rank in found])) / 1e9 for name in BESIDE}
    return {**means, "reads": float(np.mean([rank["reads"].mean() for rank in found]))}


def read_gradients(folder: Path) -> dict[str, Any]:
    """Bytes and times of a rank's gradients; empty where they were not seen."""
    try:
        return read_record(folder / GRADIENTS_FILE, shapes.Gradients) or {}
    except Damaged:
        return {}


def read_logged(folder: Path) -> list[Logged]:
    """By name, in the order in which the names first came; a step that was logged twice under a name has the later value."""
    try:
        lines = read_records(folder / LOGGED_FILE, shapes.Logged)
    except Damaged:
        return []
    found: dict[str, dict[int, tuple[float, float]]] = {}
    for line in lines:
        for name, value in line["values"].items():
            found.setdefault(name, {})[line["step"]] = value, line["time"]
    return [
        Logged(name, list(points), [value for value, _ in points.values()], [time for _, time in points.values()])
        for name, points in found.items()
    ]
