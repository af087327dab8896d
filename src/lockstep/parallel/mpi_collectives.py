"""The collectives of the backend `mpi`, one communicator each. mpi_group.py makes them and registers the backend."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from lockstep.parallel.done import Done
from lockstep.parallel.mpi_base import INLINE_BYTES, MpiBase
from lockstep.parallel.mpi_buffers import (
    REDUCIBLE,
    SUM,
    memory_at,
    moved,
    moved_unevenly,
    reduced,
    reducible,
    reduction,
    rows_to_counts,
)
from lockstep.parallel.mpi_work import Message

Tensors = list[torch.Tensor]


class MpiGroup(MpiBase):
    """Every collective of torch.distributed; arguments are checked before the ranks meet, so that a wrong one raises."""

    # ------------------------------------------------ reductions

    def allreduce(self, tensors: Tensors, options: Any = None) -> Any:
        operation = _operation(options)
        if len(tensors) == 1 and operation == SUM and self._sum_at_once(tensors[0]):
            return Done(tensors)
        hows = [reduction(operation, tensor.dtype) for tensor in tensors]

        def perform() -> None:
            for tensor, how in zip(tensors, hows, strict=True):
                mine = reducible(tensor)
                self._comm.Allreduce(MPI.IN_PLACE, reduced(mine), how.operation)
                self._give(tensor, mine, how.average)

        return self._do("all_reduce", perform, tensors, _bytes(tensors), options)

    allreduce_coalesced = allreduce

    def _sum_at_once(self, tensor: torch.Tensor) -> bool:
        """The same by a shorter way for what is nearly always asked, small gradients in one piece: half the time spent in
        Python. False where it does not apply."""
        kind, size = REDUCIBLE.get(tensor.dtype), tensor.nbytes
        if kind is None or size > INLINE_BYTES or self._progress.queue or not tensor.is_contiguous():
            return False
        self._gate.wait(self._timeout_s, "all_reduce")
        self._comm.Allreduce(MPI.IN_PLACE, (memory_at(tensor.data_ptr(), size), tensor.numel(), kind), MPI.SUM)
        return True

    def _give(self, target: torch.Tensor, mine: torch.Tensor, average: bool = False) -> None:
        """What is left to do when the numbers are there: divide, and copy where MPI could not work in place."""
        if average:
            mine.div_(self._size)
        if mine is not target:
            target.copy_(mine)

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

        return self._do("reduce", perform, tensors, tensor.nbytes, options)

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, options: Any = None) -> Any:
        how = reduction(_operation(options), output.dtype)
        _check(given.numel() == output.numel() * self._size and given.dtype is output.dtype, "reduce_scatter")

        def perform() -> None:
            source = reducible(given)
            mine = torch.empty(output.shape, dtype=source.dtype)
            self._comm.Reduce_scatter_block(reduced(source, self._size), reduced(mine), how.operation)
            self._give(output, mine, how.average)

        return self._do("reduce_scatter", perform, output, given.nbytes, options)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], options: Any = None) -> Any:
        (output,), (given,) = outputs, inputs
        return self.reduce_scatter_single(output, torch.stack(given), options)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, options: Any = None) -> Any:
        for output, given in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, given, options).wait()
        return Done(outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ------------------------------------------------ moving

    def broadcast(self, tensors: Tensors, options: Any) -> Any:
        (tensor,), root = tensors, options.rootRank

        def perform() -> None:
            mine = tensor.contiguous()
            self._comm.Bcast(moved(mine), root)
            self._give(tensor, mine)

        return self._do("broadcast", perform, tensors, tensor.nbytes, options)

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, options: Any = None) -> Any:
        _check(output.numel() == given.numel() * self._size and given.dtype is output.dtype, "all_gather")

        def perform() -> None:
            source, mine = given.contiguous(), _room_for(output)
            self._comm.Allgather(moved(source), moved(mine, self._size))
            self._give(output, mine)

        return self._do("all_gather", perform, output, output.nbytes, options)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, options: Any = None) -> Any:
        for output, given in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, given, options).wait()
        return Done(outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(self, outputs: list[Tensors], inputs: Tensors, options: Any = None) -> Any:
        (targets,), (given,) = outputs, inputs
        self._check_row(targets, given, "all_gather")

        def perform() -> None:
            source, room = given.contiguous(), self._rows_of(given)
            self._comm.Allgather(moved(source), moved(room, self._size))
            _spread(room, targets)

        return self._do("all_gather", perform, outputs, given.nbytes * self._size, options)

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, options: Any = None) -> Any:
        # torch lists the outputs by rank here, not by tensor.
        for index, given in enumerate(inputs):
            self.allgather([[row[index] for row in outputs]], [given], options).wait()
        return Done(outputs)

    def gather(self, outputs: list[Tensors], inputs: Tensors, options: Any) -> Any:
        (given,), root = inputs, options.rootRank
        if self._rank == root:
            self._check_row(outputs[0], given, "gather")

        def perform() -> None:
            source = given.contiguous()
            if self._rank == root:
                room = self._rows_of(given)
                self._comm.Gather(moved(source), moved(room, self._size), root)
                _spread(room, outputs[0])
            else:
                self._comm.Gather(moved(source), None, root)

        return self._do("gather", perform, outputs, given.nbytes, options)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], options: Any) -> Any:
        (output,), root = outputs, options.rootRank
        if self._rank == root:
            self._check_row(inputs[0], output, "scatter")

        def perform() -> None:
            mine = _room_for(output)
            source = torch.stack(inputs[0]) if self._rank == root else None
            self._comm.Scatter(None if source is None else moved(source, self._size), moved(mine), root)
            self._give(output, mine)

        return self._do("scatter", perform, outputs, output.nbytes, options)

    def all_to_all_single(
        self, output: torch.Tensor, given: torch.Tensor, to: list[int], of: list[int], options: Any = None
    ) -> Any:
        taken = rows_to_counts(output, to, self._size, "all_to_all output")
        sent = rows_to_counts(given, of, self._size, "all_to_all input")

        def perform() -> None:
            source, mine = given.contiguous(), _room_for(output)
            self._comm.Alltoallv(moved_unevenly(source, sent), moved_unevenly(mine, taken))
            self._give(output, mine)

        # Ranks may send and take different amounts, but all of them take part.
        return self._do("all_to_all", perform, output, output.nbytes, options)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Tensors, inputs: Tensors, options: Any = None) -> Any:
        taken, sent = [tensor.numel() for tensor in outputs], [tensor.numel() for tensor in inputs]
        _check(len(taken) == len(sent) == self._size, "all_to_all")

        def perform() -> None:
            source = torch.cat([tensor.reshape(-1) for tensor in inputs])
            room = torch.empty(sum(taken), dtype=source.dtype)
            self._comm.Alltoallv(moved_unevenly(source, sent), moved_unevenly(room, taken))
            for tensor, piece in zip(outputs, room.split(taken), strict=True):
                tensor.copy_(piece.view(tensor.shape))

        return self._do("all_to_all", perform, outputs, _bytes(outputs), options)

    # ------------------------------------------------ from one rank to another, and all together

    def send(self, tensors: Tensors, target: int, tag: int = 0) -> Any:
        (tensor,) = tensors
        source = tensor.contiguous()
        request = self._comm.Isend(moved(source), target, tag)
        return Message(request, tensors, self._timeout_s, "send", None, source)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Any:
        (tensor,) = tensors
        mine = _room_for(tensor)
        request = self._comm.Irecv(moved(mine), source, tag)
        return Message(request, tensors, self._timeout_s, "recv", lambda: self._give(tensor, mine), mine)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Any:
        return self.recv(tensors, MPI.ANY_SOURCE, tag)

    def barrier(self, options: Any = None, opts: Any = None) -> Any:
        return self._do("barrier", _nothing, [], 0, options)  # the gate is one

    # ------------------------------------------------ rows: one tensor for each rank

    def _rows_of(self, one: torch.Tensor) -> torch.Tensor:
        return torch.empty((self._size, *one.shape), dtype=one.dtype)

    def _check_row(self, tensors: Tensors, one: torch.Tensor, what: str) -> None:
        same = all(tensor.numel() == one.numel() and tensor.dtype is one.dtype for tensor in tensors)
        _check(same and len(tensors) == self._size, what)


def _check(fits: bool, what: str) -> None:
    if not fits:
        raise ValueError(f"backend=mpi: {what}: one tensor of the same size and type for each rank is needed")


def _operation(options: Any) -> Any:
    return dist.ReduceOp.SUM if options is None else getattr(options, "reduceOp", options)


def _bytes(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _room_for(output: torch.Tensor) -> torch.Tensor:
    """Where MPI writes: the output itself, or contiguous room beside it."""
    return output if output.is_contiguous() else torch.empty(output.shape, dtype=output.dtype)


def _spread(room: torch.Tensor, targets: Tensors) -> None:
    for target, row in zip(targets, room, strict=True):
        target.copy_(row)


def _nothing() -> None:
    return None
