"""The process group of the backend `mpi`: what moves tensors from rank to rank as they are, and the barriers; what adds them up is in
reductions.py. group.py makes one for each communicator and registers the backend."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from mpi4py import MPI

from lockstep.backends.mpi.barrier import monitored_barrier
from lockstep.backends.mpi.buffers import (
    check_fits,
    moved,
    moved_unevenly,
    room_for,
    rows_to_counts,
    size_of,
    spread,
)
from lockstep.backends.mpi.reductions import MpiReductions
from lockstep.backends.mpi.work import Message
from lockstep.backends.python_group import Tensors
from lockstep.backends.signature import signature
from lockstep.backends.work import Done
from lockstep.torch_private import untraced


@untraced
class MpiGroup(MpiReductions):
    """Every collective of torch.distributed; arguments are checked before the ranks meet, so that a wrong one raises."""

    def broadcast(self, tensors: Tensors, options: Any) -> Any:
        (tensor,), root = tensors, options.rootRank

        def perform() -> None:
            mine = tensor.contiguous()
            self._comm.Bcast(moved(mine), root)
            self._give(tensor, mine)

        alike = signature("broadcast", tensor.dtype, tensor.numel(), root=root)
        return self._do("broadcast", alike, perform, tensors, tensor.nbytes, options)

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, options: Any = None) -> Any:
        check_fits(output.numel() == given.numel() * self._size and given.dtype is output.dtype, "all_gather")

        def perform() -> None:
            source, mine = given.contiguous(), room_for(output)
            # FSDP's part lies where it belongs already, and MPI refuses memory that it would read and write.
            there = source.data_ptr() == mine.data_ptr() + self._rank * source.nbytes
            self._comm.Allgather(MPI.IN_PLACE if there else moved(source), moved(mine, self._size))
            self._give(output, mine)

        alike = signature("all_gather", given.dtype, given.numel())
        return self._do("all_gather", alike, perform, output, output.nbytes, options)

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
            spread(room, targets)

        alike = signature("all_gather", given.dtype, given.numel())
        return self._do("all_gather", alike, perform, outputs, given.nbytes * self._size, options)

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
                spread(room, outputs[0])
            else:
                self._comm.Gather(moved(source), None, root)

        alike = signature("gather", given.dtype, given.numel(), root=root)
        return self._do("gather", alike, perform, outputs, given.nbytes, options)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], options: Any) -> Any:
        (output,), root = outputs, options.rootRank
        if self._rank == root:
            self._check_row(inputs[0], output, "scatter")

        def perform() -> None:
            mine = room_for(output)
            source = torch.stack(inputs[0]) if self._rank == root else None
            self._comm.Scatter(None if source is None else moved(source, self._size), moved(mine), root)
            self._give(output, mine)

        alike = signature("scatter", output.dtype, output.numel(), root=root)
        return self._do("scatter", alike, perform, outputs, output.nbytes, options)

    def all_to_all_single(
        self, output: torch.Tensor, given: torch.Tensor, to: list[int], of: list[int], options: Any = None
    ) -> Any:
        taken = rows_to_counts(output, to, self._size, "all_to_all output")
        sent = rows_to_counts(given, of, self._size, "all_to_all input")

        def perform() -> None:
            source, mine = given.contiguous(), room_for(output)
            self._comm.Alltoallv(moved_unevenly(source, sent), moved_unevenly(mine, taken))
            self._give(output, mine)

        return self._do("all_to_all", _all_to_all(output), perform, output, output.nbytes, options)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Tensors, inputs: Tensors, options: Any = None) -> Any:
        taken, sent = [tensor.numel() for tensor in outputs], [tensor.numel() for tensor in inputs]
        check_fits(len(taken) == len(sent) == self._size, "all_to_all")

        def perform() -> None:
            source = torch.cat([tensor.reshape(-1) for tensor in inputs])
            room = torch.empty(sum(taken), dtype=source.dtype)
            self._comm.Alltoallv(moved_unevenly(source, sent), moved_unevenly(room, taken))
            for tensor, piece in zip(outputs, torch.split(room, taken), strict=True):
                tensor.copy_(piece.view(tensor.shape))

        return self._do("all_to_all", _all_to_all(outputs[0]), perform, outputs, size_of(outputs), options)

    # ------------------------------------------------ from one rank to another, and all together

    def send(self, tensors: Tensors, target: int, tag: int = 0) -> Any:
        (tensor,) = tensors
        source = tensor.contiguous()
        request = self._comm.Isend(moved(source), target, tag)
        return Message(request, tensors, self._timeout_s, "send", None, source)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Any:
        (tensor,) = tensors
        mine = room_for(tensor)
        request = self._comm.Irecv(moved(mine), source, tag)

        def finish(status: MPI.Status) -> None:
            came = status.Get_count(MPI.BYTE)
            if came != mine.nbytes:
                raise RuntimeError(
                    f"backend=mpi: recv: rank {status.source} sent {came:,} bytes, but the tensor has {mine.nbytes:,}"
                )
            self._give(tensor, mine)

        return Message(request, tensors, self._timeout_s, "recv", finish, mine)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Any:
        return self.recv(tensors, MPI.ANY_SOURCE, tag)

    def barrier(self, options: Any = None, opts: Any = None) -> Any:
        alike = signature("barrier", torch.uint8, 0)
        return self._do("barrier", alike, _nothing, [], 0, opts or options)  # the gate is one

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        limit_s = self._timeout_s if timeout is None else timeout.total_seconds()
        self._barriers += 1
        monitored_barrier(self._comm, self._barriers, limit_s, wait_all_ranks)

    # ------------------------------------------------ rows: one tensor for each rank

    def _rows_of(self, one: torch.Tensor) -> torch.Tensor:
        return torch.empty((self._size, *one.shape), dtype=one.dtype)

    def _check_row(self, tensors: Tensors, one: torch.Tensor, what: str) -> None:
        same = all(tensor.numel() == one.numel() and tensor.dtype is one.dtype for tensor in tensors)
        check_fits(same and len(tensors) == self._size, what)


def _all_to_all(output: torch.Tensor) -> int:
    """Ranks may send and take different amounts, but all of them take part, with one type."""
    return signature("all_to_all", output.dtype, 0)


def _nothing() -> None:
    return None
