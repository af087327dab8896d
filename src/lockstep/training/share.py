"""Which samples a rank takes: exact parts of every global batch, in an order that depends on (seed, epoch) alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from lockstep.data.batches import sample_order
from lockstep.errors import InputError
from lockstep.recipe import Recipe


@dataclass(frozen=True)
class Batch:
    """One rank's part of a global batch."""

    mine: torch.Tensor
    """Which samples of the set this rank takes. Never empty: a rank without any computes one that counts for nothing."""
    samples: int
    """How many of them count."""
    count: int
    """Samples of the whole batch, over all ranks."""


class Shares:
    """The global batches of one epoch, each as this rank's part of it. Can be gone through again and again."""

    def __init__(
        self, count: int, batch: int, epoch: int, shuffle: bool, seed: int, part: Callable[[int], tuple[int, int]]
    ) -> None:
        """`part`: which of a batch's samples, numbered from 0, are this rank's."""
        if epoch < 1:
            raise InputError(f"s.steps: epoch={epoch}, but epochs are numbered from 1")
        if count < 1 or batch < 1:
            raise InputError(f"s.steps: count={count} and batch={batch} must be at least 1")
        self.epoch, self.seed = epoch, seed
        self._order = sample_order(Recipe(seed=seed, shuffle=shuffle), epoch, count)
        self._batch, self._part = batch, part

    def __len__(self) -> int:
        return -(-len(self._order) // self._batch)

    def __iter__(self) -> Iterator[Batch]:
        for first in range(0, len(self._order), self._batch):
            whole = self._order[first : first + self._batch]
            low, high = self._part(len(whole))
            yield Batch(whole[low:high] if high > low else whole[:1], high - low, len(whole))
