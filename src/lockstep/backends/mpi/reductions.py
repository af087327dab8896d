"""The collectives of the backend `mpi` that add tensors up, or reduce them by another operation."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from lockstep.backends.mpi.base import INLINE_BYTES, MpiBase
from lockstep.backends.mpi.buffers import (
    REDUCIBLE,
    SUM,
    check_fits,
    memory_at,
    moved,
    moved_unevenly,
    reduced,
    reducible,
    reduction,
    size_of,
)
from lockstep.backends.python_group import Tensors
from lockstep.backends.signature import signature
from lockstep.backends.work import Done, Pending
from lockstep.torch_private import untraced

SUM_NUMBER = hash(SUM)


@untraced
class MpiReductions(MpiBase):
    """Arguments are checked before the ranks meet, so that a wrong one raises."""

    def allreduce(self, tensors: Tensors, options: Any = None) -> Any:
        operation = _operation(options)
        if len(tensors) == 1 and operation == SUM:
            if not tensors[0].is_contiguous() and tensors[0].is_sparse:
                return self._sparse_sum(tensors[0], options)
            work = self._sum_at_once(tensors[0], options)
            if work is not None:
                return work
        hows = [reduction(operation, tensor.dtype) for tensor in tensors]

        def perform() -> None:
            for tensor, how in zip(tensors, hows, strict=True):
                mine = reducible(tensor)
                self._comm.Allreduce(MPI.IN_PLACE, reduced(mine), how.operation)
                self._give(tensor, mine, how.average)

        count = sum(tensor.numel() for tensor in tensors)
        alike = signature("all_reduce", tensors[0].dtype, count, hash(operation))
        return self._do("all_reduce", alike, perform, tensors, size_of(tensors), options)

    allreduce_coalesced = allreduce

    def _sum_at_once(self, tensor: torch.Tensor, options: Any) -> Any:
        """The same by a shorter way for what is nearly always asked, small gradients in one piece: half the time spent in
        Python. None where it does not apply."""
        kind, size = REDUCIBLE.get(tensor.dtype), tensor.nbytes
        if kind is None or size > INLINE_BYTES or self._progress.queue or not tensor.is_contiguous():
            return None
        buffer = (memory_at(tensor.data_ptr(), size), tensor.numel(), kind)
        self._enter(signature("all_reduce", tensor.dtype, tensor.numel(), SUM_NUMBER))
        brief = getattr(options, "asyncOp", True)
        if self._meet("all_reduce", brief):
            self._comm.Allreduce(MPI.IN_PLACE, buffer, MPI.SUM)
            return Done([tensor])

        def queued() -> None:
            self._sleep_until_all_are_here("all_reduce")
            self._comm.Allreduce(MPI.IN_PLACE, buffer, MPI.SUM)

        return self._progress.add(Pending(queued, [tensor], "mpi"))

    def _sparse_sum(self, tensor: torch.Tensor, options: Any) -> Any:
        """Everybody's entries, gathered and added up by place."""
        mine = tensor.detach().coalesce()

        def perform() -> None:
            indices, values = mine.indices().t().contiguous(), mine.values().contiguous()
            entries = self._comm.allgather(len(indices))
            places = self._gathered_rows(indices, entries)
            numbers = self._gathered_rows(values, entries)
            total = torch.sparse_coo_tensor(places.t(), numbers, tensor.shape, check_invariants=False)
            tensor.copy_(total.coalesce())

        alike = signature("all_reduce", tensor.dtype, tensor.numel(), SUM_NUMBER, root=1)  # told from a dense one
        return self._do("all_reduce", alike, perform, [tensor], mine.values().nbytes, options)

    def _gathered_rows(self, mine: torch.Tensor, rows: list[int]) -> torch.Tensor:
        row = mine.shape[1:].numel()
        room = torch.empty((sum(rows), *mine.shape[1:]), dtype=mine.dtype)
        self._comm.Allgatherv(moved(mine), moved_unevenly(room, [count * row for count in rows]))
        return room

    def reduce(self, tensors: Tensors, options: Any) -> Any:
        (tensor,), root = tensors, options.rootRank
        how = reduction(options.reduceOp, tensor.dtype)

        def perform() -> None:
            mine = reducible(tensor)
            if self._rank == root:
                self._comm.Reduce(MPI.IN_PLACE, reduced(mine), how.operation, root)
                self._give(tensor, mine, how.average)
            else:
                self._comm.Reduce(reduced(mine), None, how.operation, root)

        alike = signature("reduce", tensor.dtype, tensor.numel(), hash(options.reduceOp), root)
        return self._do("reduce", alike, perform, tensors, tensor.nbytes, options)

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, options: Any = None) -> Any:
        how = reduction(_operation(options), output.dtype)
        check_fits(given.numel() == output.numel() * self._size and given.dtype is output.dtype, "reduce_scatter")

        def perform() -> None:
            source = reducible(given)
            mine = torch.empty(output.shape, dtype=source.dtype)
            self._comm.Reduce_scatter_block(reduced(source, self._size), reduced(mine), how.operation)
            self._give(output, mine, how.average)

        alike = signature("reduce_scatter", output.dtype, output.numel(), hash(_operation(options)))
        return self._do("reduce_scatter", alike, perform, output, given.nbytes, options)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], options: Any = None) -> Any:
        (output,), (given,) = outputs, inputs
        return self.reduce_scatter_single(output, torch.stack(given), options)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, options: Any = None) -> Any:
        for output, given in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, given, options).wait()
        return Done(outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _operation(options: Any) -> Any:
    return dist.ReduceOp.SUM if options is None else getattr(options, "reduceOp", options)
