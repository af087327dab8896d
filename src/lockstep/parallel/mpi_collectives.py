"""The collectives of the backend `mpi`, one communicator each. mpi_group.py makes them and registers the backend."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from lockstep.parallel.mpi_buffers import moved, moved_unevenly, reduced, reducible, reduction, rows_to_counts
from lockstep.parallel.mpi_work import Done, Operation, Progress, Under, poll_until_done

NAME = "lockstep_mpi"
# Up to this size an operation is finished before its call returns, even where the caller would not have waited: handing
# it to the progress thread costs more than it takes (docs/mpi.md).
INLINE_BYTES = int(os.environ.get("LOCKSTEP_MPI_INLINE_BYTES", 1 << 20))

Tensors = list[torch.Tensor]
open_groups: set[int] = set()


class MpiGroup(dist.ProcessGroup):
    """One communicator. torch calls the methods without underscore; their names and arguments are its."""

    def __init__(self, communicator: MPI.Intracomm, timeout: timedelta) -> None:
        super().__init__(communicator.rank, communicator.size)
        self._comm, self._rank, self._size = communicator, communicator.rank, communicator.size
        self._timeout_s = timeout.total_seconds()
        self._progress = Progress()
        self._name = self._description = "undefined"
        open_groups.add(id(self))

    # ------------------------------------------------ who we are; the base class asks backends that we do not have

    def getBackendName(self) -> str:
        return NAME

    def name(self) -> str:
        return NAME

    def getRank(self) -> int:
        return self._rank

    def getSize(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def shutdown(self) -> None:
        """All went well: finish what is under way and give the communicator back."""
        if id(self) in open_groups:
            self._progress.end()
            self._comm.Free()
            open_groups.discard(id(self))

    def abort(self) -> None:
        """Nothing to do here: a rank that ends without Finalize makes mpirun end the others."""

    # ------------------------------------------------ from an operation to what torch waits for

    def _submit(self, operation: Operation, bytes_moved: int, options: Any) -> Any:
        if bytes_moved <= INLINE_BYTES or not getattr(options, "asyncOp", True):
            poll_until_done(operation, self._timeout_s)
            return Done(operation.result)
        return Under(operation, self._timeout_s, self._progress).follow()

    # ------------------------------------------------ reductions

    def allreduce(self, tensors: Tensors, options: Any = None) -> Any:
        requests, copies, size = [], [], 0
        for tensor in tensors:
            how = reduction(_operation(options), tensor.dtype)
            mine = reducible(tensor)
            requests.append(self._comm.Iallreduce(MPI.IN_PLACE, reduced(mine), how.operation))
            copies.append((tensor, mine, how.average))
            size += mine.nbytes
        requests.reverse()  # an operation polls its last request first
        finish = self._copies_back(copies)
        return self._submit(Operation("all_reduce", requests, tensors, finish, copies), size, options)

    allreduce_coalesced = allreduce

    def _copies_back(self, copies: list[tuple[torch.Tensor, torch.Tensor, bool]]) -> Callable[[], None] | None:
        """What is left to do when the sums are there: divide, and copy where MPI could not work in place."""
        if all(target is mine and not average for target, mine, average in copies):
            return None

        def finish() -> None:
            for target, mine, average in copies:
                if average:
                    mine.div_(self._size)
                if mine is not target:
                    target.copy_(mine)

        return finish

    def reduce(self, tensors: Tensors, options: Any) -> Any:
        (tensor,) = tensors
        how, root = reduction(options.reduceOp, tensor.dtype), options.rootRank
        mine = reducible(tensor)
        if self._rank == root:
            request = self._comm.Ireduce(MPI.IN_PLACE, reduced(mine), how.operation, root)
            finish = self._copies_back([(tensor, mine, how.average)])
        else:
            request, finish = self._comm.Ireduce(reduced(mine), None, how.operation, root), None
        return self._submit(Operation("reduce", [request], tensors, finish, mine), mine.nbytes, options)

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, options: Any = None) -> Any:
        how = reduction(_operation(options), output.dtype)
        if given.numel() != output.numel() * self._size:
            raise ValueError(f"reduce_scatter: {given.numel()} elements are not {self._size} x {output.numel()}")
        source = reducible(given)
        mine = torch.empty(output.shape, dtype=source.dtype)
        request = self._comm.Ireduce_scatter_block(reduced(source, self._size), reduced(mine), how.operation)
        finish = self._copies_back([(output, mine, how.average)])
        operation = Operation("reduce_scatter", [request], output, finish, (source, mine))
        return self._submit(operation, source.nbytes, options)

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
        (tensor,) = tensors
        mine = tensor.contiguous()
        request = self._comm.Ibcast(moved(mine), options.rootRank)
        finish = self._copies_back([(tensor, mine, False)])
        return self._submit(Operation("broadcast", [request], tensors, finish, mine), mine.nbytes, options)

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, options: Any = None) -> Any:
        if output.numel() != given.numel() * self._size:
            raise ValueError(f"all_gather: {output.numel()} elements are not {self._size} x {given.numel()}")
        source, mine = given.contiguous(), _room_for(output)
        request = self._comm.Iallgather(moved(source), moved(mine, self._size))
        finish = self._copies_back([(output, mine, False)])
        operation = Operation("all_gather", [request], output, finish, (source, mine))
        return self._submit(operation, mine.nbytes, options)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, options: Any = None) -> Any:
        for output, given in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, given, options).wait()
        return Done(outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(self, outputs: list[Tensors], inputs: Tensors, options: Any = None) -> Any:
        (targets,), (given,) = outputs, inputs
        _check_same(targets, given, "all_gather")
        source = given.contiguous()
        room = torch.empty((self._size, *given.shape), dtype=given.dtype)
        request = self._comm.Iallgather(moved(source), moved(room, self._size))
        operation = Operation("all_gather", [request], outputs, _spread(room, targets), (source, room))
        return self._submit(operation, room.nbytes, options)

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, options: Any = None) -> Any:
        # torch lists the outputs by rank here, not by tensor.
        for index, given in enumerate(inputs):
            self.allgather([[row[index] for row in outputs]], [given], options).wait()
        return Done(outputs)

    def gather(self, outputs: list[Tensors], inputs: Tensors, options: Any) -> Any:
        (given,), root = inputs, options.rootRank
        source = given.contiguous()
        if self._rank != root:
            request = self._comm.Igather(moved(source), None, root)
            return self._submit(Operation("gather", [request], outputs, None, source), source.nbytes, options)
        _check_same(outputs[0], given, "gather")
        room = torch.empty((self._size, *given.shape), dtype=given.dtype)
        request = self._comm.Igather(moved(source), moved(room, self._size), root)
        operation = Operation("gather", [request], outputs, _spread(room, outputs[0]), (source, room))
        return self._submit(operation, source.nbytes, options)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], options: Any) -> Any:
        (output,), root = outputs, options.rootRank
        mine = _room_for(output)
        source = None
        if self._rank == root:
            _check_same(inputs[0], output, "scatter")
            source = torch.stack(inputs[0])
        request = self._comm.Iscatter(None if source is None else moved(source, self._size), moved(mine), root)
        finish = self._copies_back([(output, mine, False)])
        return self._submit(Operation("scatter", [request], outputs, finish, (source, mine)), mine.nbytes, options)

    def all_to_all_single(
        self, output: torch.Tensor, given: torch.Tensor, to: list[int], of: list[int], options: Any = None
    ) -> Any:
        source, mine = given.contiguous(), _room_for(output)
        taken = rows_to_counts(output, to, self._size, "all_to_all output")
        sent = rows_to_counts(given, of, self._size, "all_to_all input")
        request = self._comm.Ialltoallv(moved_unevenly(source, sent), moved_unevenly(mine, taken))
        finish = self._copies_back([(output, mine, False)])
        operation = Operation("all_to_all", [request], output, finish, (source, mine))
        return self._submit(operation, mine.nbytes, options)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Tensors, inputs: Tensors, options: Any = None) -> Any:
        source = torch.cat([tensor.reshape(-1) for tensor in inputs])
        taken, sent = [tensor.numel() for tensor in outputs], [tensor.numel() for tensor in inputs]
        room = torch.empty(sum(taken), dtype=source.dtype)
        request = self._comm.Ialltoallv(moved_unevenly(source, sent), moved_unevenly(room, taken))

        def finish() -> None:
            for tensor, piece in zip(outputs, room.split(taken), strict=True):
                tensor.copy_(piece.view(tensor.shape))

        return self._submit(Operation("all_to_all", [request], outputs, finish, (source, room)), room.nbytes, options)

    # ------------------------------------------------ from one rank to another, and all together

    def send(self, tensors: Tensors, target: int, tag: int = 0) -> Any:
        (tensor,) = tensors
        source = tensor.contiguous()
        request = self._comm.Isend(moved(source), target, tag)
        return Under(Operation("send", [request], tensors, None, source), self._timeout_s, self._progress)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Any:
        (tensor,) = tensors
        mine = _room_for(tensor)
        request = self._comm.Irecv(moved(mine), source, tag)
        finish = self._copies_back([(tensor, mine, False)])
        return Under(Operation("recv", [request], tensors, finish, mine), self._timeout_s, self._progress)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Any:
        return self.recv(tensors, MPI.ANY_SOURCE, tag)

    def barrier(self, options: Any = None, opts: Any = None) -> Any:
        return self._submit(Operation("barrier", [self._comm.Ibarrier()], []), 0, options)


def _operation(options: Any) -> Any:
    return dist.ReduceOp.SUM if options is None else getattr(options, "reduceOp", options)


def _room_for(output: torch.Tensor) -> torch.Tensor:
    """Where MPI writes: the output itself, or contiguous room beside it."""
    return output if output.is_contiguous() else torch.empty(output.shape, dtype=output.dtype)


def _spread(room: torch.Tensor, targets: Tensors) -> Callable[[], None]:
    def finish() -> None:
        for target, row in zip(targets, room, strict=True):
            target.copy_(row)

    return finish


def _check_same(tensors: Tensors, one: torch.Tensor, what: str) -> None:
    for tensor in tensors:
        if tensor.numel() != one.numel() or tensor.dtype is not one.dtype:
            raise ValueError(f"{what}: tensors of {tensor.numel()} and {one.numel()} elements, or of several types")
