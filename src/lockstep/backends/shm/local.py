"""Collectives among the ranks of one host, on flat tensors in shared memory.

A collective is a generator: it yields whom it has to wait for, and goes on when that rank has come. So the caller can begin
it and another thread can end it (group.py). Data longer than a slot go in pieces, one operation each.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.backends.shm.quick import Quick
from lockstep.backends.shm.reduce import SUM, Combine, combiner
from lockstep.backends.shm.segment import SLOT, Need, Segment
from lockstep.backends.shm.tag import BARRIER, BROADCAST, GATHER, REDUCE, SCATTER, tag_of
from lockstep.plan import share_of

# From here on, with three ranks or more, each rank reduces its part and the parts are put together: less to read for each,
# at the price of a second wait. With two ranks there is nothing to gain.
DIVIDE_FROM = 64 << 10
_PLANS = 512

Steps = Generator[Need, None, None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What an operation needs, prepared once for a kind, type and size; making views costs as much as adding 17 KB."""

    tag: int
    mine: tuple[torch.Tensor, torch.Tensor]
    """This rank's slots, by the parity of the operation's number."""
    all: tuple[list[torch.Tensor], list[torch.Tensor]]
    combine: Combine | None


class Local:
    """One rank's end. All ranks call the same methods in the same order."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._plans: dict[tuple[int, int, torch.dtype], Plan] = {}
        self.index, self.ranks = segment.index, segment.ranks
        self._quick = Quick(segment)
        self._direct_to = SLOT if segment.ranks <= 2 else DIVIDE_FROM

    def begun(self) -> int:
        return self._segment.begun()

    def barrier(self) -> Steps:
        segment = self._segment
        number = segment.begin()
        yield from segment.missing(number - 1)
        segment.post(number, BARRIER)
        yield from segment.missing(number)

    def quick_sum(self, tensor: torch.Tensor, brief: bool) -> Iterator[Need] | None:
        """The sum, if the tensor's memory has come before and is of the kind that has a short way: then what is left to do,
        which is nothing unless the caller has something better to do than to wait for a late rank."""
        left = self._quick.sum(tensor, brief)
        if left is None and self.ranks > 1 and self._quick.fits(tensor):
            self._quick.prepare(tensor, self._plan(REDUCE, SUM, tensor.dtype, tensor.numel()).tag)
        return left

    def all_reduce(self, flat: torch.Tensor, operation: int) -> Steps:
        if flat.nbytes <= self._direct_to:
            yield from self._all_reduce(flat, operation)
            return
        for piece in _pieces(flat, SLOT):
            if self.ranks > 2:
                yield from self._all_reduce_divided(piece, operation)
            else:
                yield from self._all_reduce(piece, operation)

    def _all_reduce(self, piece: torch.Tensor, operation: int) -> Steps:
        segment = self._segment
        plan = self._plan(REDUCE, operation, piece.dtype, piece.numel())
        number = segment.begin()
        yield from segment.missing(number - 1)
        plan.mine[number & 1].copy_(piece)
        segment.post(number, plan.tag)
        yield from segment.missing(number)
        plan.combine(plan.all[number & 1], piece)  # type: ignore[misc]

    def _all_reduce_divided(self, piece: torch.Tensor, operation: int) -> Steps:
        segment = self._segment
        plan = self._plan(REDUCE, operation, piece.dtype, piece.numel())
        shares = [share_of(piece.numel(), index, self.ranks) for index in range(self.ranks)]
        number = segment.begin()
        yield from segment.missing(number - 1)
        plan.mine[number & 1].copy_(piece)
        segment.post(number, plan.tag)
        yield from segment.missing(number)
        low, high = shares[self.index]
        parts = [slot[low:high] for slot in plan.all[number & 1]]
        number = segment.begin()
        plan.combine(parts, plan.mine[number & 1][low:high])  # type: ignore[misc]
        segment.post(number, plan.tag)
        yield from segment.missing(number)
        for slot, (low, high) in zip(plan.all[number & 1], shares, strict=True):
            piece[low:high].copy_(slot[low:high])

    def reduce(self, flat: torch.Tensor, operation: int, root: int) -> Steps:
        """Into the root's tensor; the others' stay as they are."""
        segment = self._segment
        for piece in _pieces(flat, SLOT):
            plan = self._plan(REDUCE, operation, piece.dtype, piece.numel(), root + 1)
            number = segment.begin()
            yield from segment.missing(number - 1)
            plan.mine[number & 1].copy_(piece)
            segment.post(number, plan.tag)
            if self.index == root:
                yield from segment.missing(number)
                plan.combine(plan.all[number & 1], piece)  # type: ignore[misc]

    def broadcast(self, flat: torch.Tensor, root: int) -> Steps:
        segment = self._segment
        for piece in _pieces(flat, SLOT):
            plan = self._plan(BROADCAST, 0, piece.dtype, piece.numel(), root + 1)
            number = segment.begin()
            yield from segment.missing(number - 1)
            if self.index == root:
                plan.mine[number & 1].copy_(piece)
                segment.post(number, plan.tag)
            else:
                segment.post(number, plan.tag)
                yield root, number
                segment.check(number)
                piece.copy_(plan.all[number & 1][root])

    def gather(self, outputs: Sequence[torch.Tensor], flat: torch.Tensor, root: int | None = None) -> Steps:
        """Everybody's tensors into the outputs of the root, or of all."""
        segment = self._segment
        start = 0
        for piece in _pieces(flat, SLOT):
            stop = start + piece.numel()
            plan = self._plan(GATHER, 0, piece.dtype, piece.numel(), 0 if root is None else root + 1)
            number = segment.begin()
            yield from segment.missing(number - 1)
            plan.mine[number & 1].copy_(piece)
            segment.post(number, plan.tag)
            if outputs:
                yield from segment.missing(number)
                for output, slot in zip(outputs, plan.all[number & 1], strict=True):
                    output[start:stop].copy_(slot)
            start = stop

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], operation: int) -> Steps:
        """The reduction of everybody's input number k becomes the output of rank k."""
        segment, count = self._segment, output.numel()
        step = SLOT // output.element_size() // self.ranks
        for start in range(0, max(count, 1), step):
            length = min(step, count - start)
            plan = self._plan(SCATTER, operation, output.dtype, length * self.ranks)
            number = segment.begin()
            yield from segment.missing(number - 1)
            for index, given in enumerate(inputs):
                plan.mine[number & 1][index * length : (index + 1) * length].copy_(given[start : start + length])
            segment.post(number, plan.tag)
            yield from segment.missing(number)
            low = self.index * length
            parts = [slot[low : low + length] for slot in plan.all[number & 1]]
            plan.combine(parts, output[start : start + length])  # type: ignore[misc]

    def wait(self, need: Need, brief: bool) -> bool:
        """Until it is met. With `brief`, returns False instead of sleeping."""
        index, number = need
        if not self._segment.reach(index, number):
            if brief:
                return False
            self._segment.sleep_until(index, number)
        return True

    def sleep_until(self, need: Need) -> None:
        """Until it is met, without ever holding the core: it belongs to the thread that computes."""
        self._segment.sleep_until(*need)

    def give_up(self, why: str) -> None:
        self._segment.give_up(why)

    def close(self) -> None:
        self._plans.clear()
        self._quick.close()
        self._segment.close()

    def _plan(self, kind: int, operation: int, dtype: torch.dtype, count: int, root: int = 0) -> Plan:
        """`root` counts from 1, and 0 stands for all."""
        key = (kind << 16 | operation << 8 | root, count, dtype)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._new_plan(kind, operation, dtype, count, root)
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            self._plans[key] = plan
        return plan

    def _new_plan(self, kind: int, operation: int, dtype: torch.dtype, count: int, root: int) -> Plan:
        slots: Any = tuple(
            [self._segment.slot(index, parity, count, dtype) for index in range(self.ranks)] for parity in (0, 1)
        )
        return Plan(
            tag=tag_of(kind, operation, dtype, count, root),
            mine=(slots[0][self.index], slots[1][self.index]),
            all=slots,
            combine=combiner(operation, dtype, self.ranks) if kind in (REDUCE, SCATTER) else None,
        )


def _pieces(flat: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    """The tensor in pieces of at most `limit` bytes; an empty one is one empty piece, so that all ranks still meet."""
    if flat.nbytes <= limit:
        yield flat
        return
    step = limit // flat.element_size()
    for start in range(0, flat.numel(), step):
        yield flat[start : start + step]
