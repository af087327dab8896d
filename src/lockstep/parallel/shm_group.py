"""The backend `shm`: a torch.distributed process group whose ranks of one host exchange through shared memory.

Within one host: all_reduce, reduce, broadcast, all_gather, gather, reduce_scatter and barrier. With several hosts
all_reduce, reduce, broadcast and barrier are hierarchical: shared memory within a host, gloo between the first ranks of
the hosts. Everything else goes to an inner gloo group (docs/shm.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import ProcessGroup, ReduceOp, Work

from lockstep.parallel import shm_meet
from lockstep.parallel.done import Done
from lockstep.parallel.shm_base import PythonGroup, gloo_group
from lockstep.parallel.shm_local import Local
from lockstep.parallel.shm_reduce import OPERATIONS, SUM, divide, operation_of, wider
from lockstep.parallel.shm_work import (
    Received,
    Tensors,
    bytes_of,
    flat_of,
    listed,
    parts_of,
    put_back,
    rows_of,
)

NAME = "lockstep_shm"


def register() -> str:
    """Make the backend known to torch.distributed; returns the name for `init_process_group`."""
    shm_meet.check_machine()
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
    return NAME


def _create(options: Any, backend_options: Any = None) -> ShmGroup:
    return ShmGroup(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        list(options.global_ranks_in_group) or list(range(options.group_size)),
    )


class ShmGroup(PythonGroup):
    """One rank's end of the group."""

    backend_name = NAME

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, names: Sequence[int]) -> None:
        super().__init__(store, rank, size)
        shm = PrefixStore("shm/", store)
        cards = shm_meet.exchange_cards(shm, rank, size)
        hosts = shm_meet.hosts_of(cards)
        self._host = next(i for i, members in enumerate(hosts) if rank in members)
        self._members = hosts[self._host]
        self._host_of = {member: i for i, members in enumerate(hosts) for member in members}
        self._one_host = len(hosts) == 1
        seconds = timeout.total_seconds()
        self._local = Local(shm_meet.open_segment(shm, rank, self._members, cards, names, seconds))
        self._gloo: ProcessGroup | None = gloo_group(PrefixStore("gloo/", store), rank, size, timeout)
        self._between: ProcessGroup | None = None
        if not self._one_host and rank == self._members[0]:
            self._between = gloo_group(PrefixStore("leaders/", store), self._host, len(hosts), timeout)

    # Collectives in shared memory.

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        number = operation_of(ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts))
        for tensor in listed(tensors):
            if number == SUM and self._one_host and self._local.quick_sum(tensor):
                continue
            if tensor.layout is not torch.strided:
                return self._inner.allreduce(tensors, opts)
            flat = flat_of(tensor)
            if self._one_host:
                self._local.all_reduce(flat, number)
            else:
                self._all_reduce_over_hosts(flat, number)
            put_back(flat, tensor)
        # A caller who waits anyway takes None for "done", and making a Work takes a microsecond of the ten.
        return Done(tensors) if getattr(opts, "asyncOp", True) else None

    allreduce_coalesced = allreduce

    def _all_reduce_over_hosts(self, flat: torch.Tensor, number: int) -> None:
        """Within each host to its first rank, between the first ranks, and back."""
        average = OPERATIONS[number].average
        if average:
            number = SUM
        wide = flat.to(wider(flat.dtype))
        self._local.reduce(wide, number, 0)
        if self._between is not None:
            options = dist.AllreduceOptions()
            options.reduceOp = ReduceOp(ReduceOp.RedOpType(number))
            self._between.allreduce([wide], options).wait()
            if average:
                divide(wide, self._size)
        self._local.broadcast(wide, 0)
        if wide is not flat:
            flat.copy_(wide)

    def reduce(self, tensors: Any, opts: Any = None, **_: Any) -> Work:
        tensors = listed(tensors)
        root, number = opts.rootRank, operation_of(opts.reduceOp)
        for tensor in tensors:
            flat = flat_of(tensor)
            if self._one_host:
                self._local.reduce(flat, number, root)
            else:
                copy = flat.clone()
                self._all_reduce_over_hosts(copy, number)
                if self._rank == root:
                    flat.copy_(copy)
            if self._rank == root:
                put_back(flat, tensor)
        return Done(tensors)

    def broadcast(self, tensors: Any, opts: Any = None, **_: Any) -> Work:
        tensors = listed(tensors)
        root = opts.rootRank
        for tensor in tensors:
            flat = flat_of(tensor)
            data = bytes_of(flat)
            if self._one_host:
                self._local.broadcast(data, root)
            else:
                self._broadcast_over_hosts(data, root)
            if self._rank != root:
                put_back(flat, tensor)
        return Done(tensors)

    def _broadcast_over_hosts(self, data: torch.Tensor, root: int) -> None:
        home = self._host_of[root]
        if self._host == home:
            self._local.broadcast(data, self._members.index(root))
        if self._between is not None:
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = home, 0
            self._between.broadcast([data], options).wait()
        if self._host != home:
            self._local.broadcast(data, 0)

    def barrier(self, opts: Any = None, **_: Any) -> Work:
        self._local.barrier()
        if not self._one_host:
            if self._between is not None:
                self._between.barrier().wait()
            self._local.barrier()
        return Done([])

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        for outs, tensor in zip(outputs, listed(inputs), strict=True):
            self._gather(outs, tensor, None)
        return Done(outputs)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        return self.allgather(outputs, inputs, opts)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        flat = flat_of(output)
        self._gather(parts_of(flat, self._size), tensor, None)
        put_back(flat, output)
        return Done([output])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, tensor)
        return Done(outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, **_: Any) -> Work:
        root = opts.rootRank
        self._gather(outputs[0] if self._rank == root else [], listed(inputs)[0], root)
        return Done(outputs)

    def _gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int | None) -> None:
        """Everybody's tensors into the outputs, of which only the root has some, or all have."""
        data = bytes_of(flat_of(tensor))
        flats = [flat_of(output) for output in outputs]
        places = [bytes_of(flat) for flat in flats]
        if self._one_host:
            self._local.gather(places, data, root)
        elif root is None:
            self._inner.allgather([places], [data]).wait()
        else:
            options = dist.GatherOptions()
            options.rootRank = root
            self._inner.gather([places] if places else [], [data], options).wait()
        for flat, output in zip(flats, outputs, strict=True):
            put_back(flat, output)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        for output, given in zip(listed(outputs), inputs, strict=True):
            self._reduce_scatter(output, given, opts)
        return Done(outputs)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        self._reduce_scatter(output, parts_of(flat_of(tensor), self._size), opts)
        return Done([output])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, tensor, opts)
        return Done(outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], opts: Any) -> None:
        number = operation_of(ReduceOp.SUM if opts is None else opts.reduceOp)
        flat = flat_of(output)
        if self._one_host:
            self._local.reduce_scatter(flat, [flat_of(given) for given in inputs], number)
        else:
            whole = torch.cat([flat_of(given) for given in inputs])
            self._all_reduce_over_hosts(whole, number)
            flat.copy_(parts_of(whole, self._size)[self._rank])
        put_back(flat, output)

    # Collectives that are gloo's. Data travel as bytes, because gloo does not know every type.

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, **_: Any) -> Work:
        output = listed(outputs)[0]
        flat = flat_of(output)
        options = dist.ScatterOptions()
        options.rootRank = opts.rootRank
        given = [[bytes_of(flat_of(tensor)) for tensor in inputs[0]]] if self._rank == opts.rootRank else []
        self._inner.scatter([bytes_of(flat)], given, options).wait()
        put_back(flat, output)
        return Done(outputs)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        flats = [flat_of(output) for output in outputs]
        sent = [bytes_of(flat_of(tensor)) for tensor in inputs]
        sizes = [flat.nbytes for flat in flats]
        received = torch.empty(sum(sizes), dtype=torch.uint8)
        self._inner.alltoall_base(received, torch.cat(sent), sizes, [data.numel() for data in sent]).wait()
        for flat, output, data in zip(flats, outputs, torch.split(received, sizes), strict=True):
            bytes_of(flat).copy_(data)
            put_back(flat, output)
        return Done(outputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: list[int] | None = None,
        input_splits: list[int] | None = None,
        opts: Any = None,
    ) -> Work:
        self.alltoall(rows_of(output, output_splits, self._size), rows_of(tensor, input_splits, self._size))
        return Done([output])

    alltoall_base = all_to_all_single

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Work:
        return self._inner.send([tensors[0].contiguous()], dst, tag)

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> Work:
        return self._received(lambda buffer: self._inner.recv([buffer], src, tag), tensors[0])

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        return self._received(lambda buffer: self._inner.recv_anysource([buffer], tag), tensors[0])

    def _received(self, receive: Callable[[torch.Tensor], Work], tensor: torch.Tensor) -> Work:
        if tensor.is_contiguous():
            return receive(tensor)
        buffer = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        return Received(receive(buffer), buffer, tensor)

    @property
    def _inner(self) -> ProcessGroup:
        if self._gloo is None:
            raise RuntimeError("this process group was shut down")
        return self._gloo

    def shutdown(self) -> None:
        self._local.close()
        self._gloo = self._between = None

    abort = shutdown
