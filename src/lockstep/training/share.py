"""Which samples a rank takes: exact parts of every global batch, in an order that depends on (seed, epoch) alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lockstep.data.batches import sample_order
from lockstep.errors import InputError
from lockstep.placement import share_of
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

    def __init__(self, count: int, batch: int, epoch: int, shuffle: bool, seed: int, rank: int, world: int) -> None:
        if epoch < 1:
            raise InputError(f"s.steps: epoch={epoch}, but epochs are numbered from 1")
        if count < 1 or batch < 1:
            raise InputError(f"s.steps: count={count} and batch={batch} must be at least 1")
        if batch % world:
            above = batch + world - batch % world
            raise InputError(f"s.steps: batch={batch} does not divide by ranks={world}: choose batch={above}")
        self.epoch, self.seed = epoch, seed
        self._order = sample_order(Recipe(seed=seed, shuffle=shuffle), epoch, count)
        self._batch, self._rank, self._world = batch, rank, world

    def __len__(self) -> int:
        return -(-len(self._order) // self._batch)

    def __iter__(self) -> Iterator[Batch]:
        for first in range(0, len(self._order), self._batch):
            whole = self._order[first : first + self._batch]
            low, high = share_of(len(whole), self._rank, self._world)
            yield Batch(whole[low:high] if high > low else whole[:1], high - low, len(whole))
