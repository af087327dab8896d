"""What another seed changes, estimated from all cells of a table at once: a randomized block design, with seeds as the blocks.

A training of an hour is made with two seeds, not with ten, and two pairs say next to nothing of their own spread. But seeds move all recipes of
a study by about as much, so each cell adds what it knows: five cells with two seeds leave four degrees of freedom where each pair has one.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Cell = Mapping[Hashable, float]


@dataclass(frozen=True)
class Spread:
    """The standard deviation of a value about the level of its cell and that of its block."""

    deviation: float
    degrees: int

    @property
    def of_pairs(self) -> float:
        """That of the difference between two cells in one block."""
        return math.sqrt(2) * self.deviation


def pooled(cells: Sequence[Cell]) -> Spread | None:
    """Value = cell + block + noise, by least squares; None where no value is left over to tell the noise by.

    A cell that gives the same value every time (a net that does not learn) says nothing about the others, and is left out.
    """
    told = [cell for cell in cells if len(cell) > 1 and len(set(cell.values())) > 1]
    blocks = sorted({block for cell in told for block in cell}, key=repr)
    values = [(c, blocks.index(block), value) for c, cell in enumerate(told) for block, value in cell.items()]
    if not values:
        return None
    design = np.zeros((len(values), len(told) + len(blocks)))
    for row, (cell, block, _) in enumerate(values):
        design[row, cell] = design[row, len(told) + block] = 1.0
    observed = np.array([value for _, _, value in values])
    fitted, _, rank, _ = np.linalg.lstsq(design, observed, rcond=None)
    degrees = len(values) - int(rank)
    if degrees < 1:
        return None
    return Spread(math.sqrt(float(np.sum((observed - design @ fitted) ** 2)) / degrees), degrees)
