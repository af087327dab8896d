"""Which samples a rank takes: exact parts of every global batch, in an order that depends on (seed, epoch) alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import torch

from lockstep.data.batches import sample_order
from lockstep.errors import InputError
from lockstep.measure.recorder import Recorder
from lockstep.plan import divided
from lockstep.recipe import Recipe
from lockstep.training.balance import Balance, balance_of
from lockstep.training.context import Context


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


class Division:
    """How a script's batches are divided over its ranks: as the placement says; with shares=auto by what their steps took."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._plan = context.plan
        """As of now."""
        self._balance: Balance | None = None

    def shares(self, count: int, batch: int, epoch: int, shuffle: bool, seed: int) -> Shares:
        shares, world = self._context.placement.shares, self._context.rank.world
        if shares is None and batch % world:
            above = batch + world - batch % world
            raise InputError(f"s.steps: batch={batch} does not divide by ranks={world}: choose batch={above}")
        if batch != self._plan.global_batch and shares is not None:
            plan = msgspec.structs.replace(self._plan, global_batch=batch)
            # What was measured at another batch says little about this one.
            self._plan = divided(plan, self._context.placement, [1] * world if shares == "auto" else shares)
            self._balance = None
        return Shares(count, batch, epoch, shuffle, seed, self.part)

    def part(self, count: int) -> tuple[int, int]:
        """Which of `count` samples, numbered from 0, are this rank's."""
        return self._plan.part(count, self._context.rank.rank)

    def watch(self, recorder: Recorder) -> None:
        """Steps follow: where batches are to be divided by what they take, look at them."""
        self._balance = self._balance or balance_of(self._context, self._plan, recorder)

    def after_step(self, count: int) -> None:
        """A step on `count` samples of all ranks is over."""
        if self._balance:
            self._balance.after_step(count)
            self._plan = self._balance.plan
            self._balance.recorder.clock.start()  # what ranks told each other is no part of the next step

    def of_a_batch(self) -> list[int] | None:
        """What each rank takes of a whole batch; None where all take the same."""
        return self._plan.parts(self._plan.global_batch) if self._plan.shares else None
