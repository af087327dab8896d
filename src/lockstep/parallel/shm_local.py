"""Collectives among the ranks of one host, on flat tensors in shared memory.

Each call is over when it returns. Data longer than a slot go in pieces, one operation each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.parallel.shm_quick import Quick
from lockstep.parallel.shm_reduce import SUM, Combine, combiner
from lockstep.parallel.shm_segment import SLOT, Segment
from lockstep.placement import share_of

# From here on, with three ranks or more, each rank reduces its part and the parts are put together: less to read for each,
# at the price of a second wait. With two ranks there is nothing to gain.
DIVIDE_FROM = 64 << 10
_PLANS = 512

_BARRIER, _REDUCE, _BROADCAST, _GATHER, _SCATTER = range(1, 6)
_TYPES = {
    dtype: number
    for number, dtype in enumerate(
        sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
    )
}


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

    def barrier(self) -> None:
        segment = self._segment
        number = segment.begin()
        segment.exchange(number, _BARRIER)

    def quick_sum(self, tensor: torch.Tensor) -> bool:
        """The sum, if the tensor's memory has come before and is of the kind that has a short way."""
        if self._quick.sum(tensor):
            return True
        if self.ranks > 1 and self._quick.fits(tensor):
            self._quick.prepare(tensor, self._plan(_REDUCE, SUM, tensor.dtype, tensor.numel()).tag)
        return False

    def all_reduce(self, flat: torch.Tensor, operation: int) -> None:
        if flat.nbytes > self._direct_to:
            for piece in _pieces(flat, SLOT):
                if self.ranks > 2:
                    self._all_reduce_divided(piece, operation)
                else:
                    self._all_reduce(piece, operation)
            return
        self._all_reduce(flat, operation)

    def _all_reduce(self, piece: torch.Tensor, operation: int) -> None:
        segment = self._segment
        plan = self._plan(_REDUCE, operation, piece.dtype, piece.numel())
        number = segment.begin()
        parity = number & 1
        plan.mine[parity].copy_(piece)
        segment.exchange(number, plan.tag)
        plan.combine(plan.all[parity], piece)  # type: ignore[misc]

    def _all_reduce_divided(self, piece: torch.Tensor, operation: int) -> None:
        segment = self._segment
        plan = self._plan(_REDUCE, operation, piece.dtype, piece.numel())
        shares = [share_of(piece.numel(), index, self.ranks) for index in range(self.ranks)]
        number = segment.begin()
        plan.mine[number & 1].copy_(piece)
        segment.exchange(number, plan.tag)
        low, high = shares[self.index]
        parts = [slot[low:high] for slot in plan.all[number & 1]]
        number = segment.begin()
        plan.combine(parts, plan.mine[number & 1][low:high])  # type: ignore[misc]
        segment.exchange(number, plan.tag)
        for slot, (low, high) in zip(plan.all[number & 1], shares, strict=True):
            piece[low:high].copy_(slot[low:high])

    def reduce(self, flat: torch.Tensor, operation: int, root: int) -> None:
        """Into the root's tensor; the others' stay as they are."""
        segment = self._segment
        for piece in _pieces(flat, SLOT):
            plan = self._plan(_REDUCE, operation, piece.dtype, piece.numel(), root + 1)
            number = segment.begin()
            plan.mine[number & 1].copy_(piece)
            segment.post(number, plan.tag)
            if self.index == root:
                segment.wait_all(number, plan.tag)
                plan.combine(plan.all[number & 1], piece)  # type: ignore[misc]

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        segment = self._segment
        for piece in _pieces(flat, SLOT):
            plan = self._plan(_BROADCAST, 0, piece.dtype, piece.numel(), root + 1)
            number = segment.begin()
            if self.index == root:
                plan.mine[number & 1].copy_(piece)
                segment.post(number, plan.tag)
            else:
                segment.post(number, plan.tag)
                segment.wait(root, number, plan.tag)
                piece.copy_(plan.all[number & 1][root])

    def gather(self, outputs: Sequence[torch.Tensor], flat: torch.Tensor, root: int | None = None) -> None:
        """Everybody's tensors into the outputs of the root, or of all."""
        segment = self._segment
        start = 0
        for piece in _pieces(flat, SLOT):
            stop = start + piece.numel()
            plan = self._plan(_GATHER, 0, piece.dtype, piece.numel(), 0 if root is None else root + 1)
            number = segment.begin()
            plan.mine[number & 1].copy_(piece)
            segment.post(number, plan.tag)
            if outputs:
                segment.wait_all(number, plan.tag)
                for output, slot in zip(outputs, plan.all[number & 1], strict=True):
                    output[start:stop].copy_(slot)
            start = stop

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], operation: int) -> None:
        """The reduction of everybody's input number k becomes the output of rank k."""
        segment, count = self._segment, output.numel()
        step = SLOT // output.element_size() // self.ranks
        for start in range(0, max(count, 1), step):
            length = min(step, count - start)
            plan = self._plan(_SCATTER, operation, output.dtype, length * self.ranks)
            number = segment.begin()
            for index, given in enumerate(inputs):
                plan.mine[number & 1][index * length : (index + 1) * length].copy_(given[start : start + length])
            segment.exchange(number, plan.tag)
            low = self.index * length
            parts = [slot[low : low + length] for slot in plan.all[number & 1]]
            plan.combine(parts, output[start : start + length])  # type: ignore[misc]

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
            tag=kind | operation << 4 | _TYPES[dtype] << 8 | root << 16 | count << 32,
            mine=(slots[0][self.index], slots[1][self.index]),
            all=slots,
            combine=combiner(operation, dtype, self.ranks) if kind in (_REDUCE, _SCATTER) else None,
        )


def _pieces(flat: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    """The tensor in pieces of at most `limit` bytes; an empty one is one empty piece, so that all ranks still meet."""
    if flat.nbytes <= limit:
        yield flat
        return
    step = limit // flat.element_size()
    for start in range(0, flat.numel(), step):
        yield flat[start : start + step]
