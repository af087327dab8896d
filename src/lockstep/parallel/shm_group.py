"""The backend `shm`: a torch.distributed process group whose ranks of one host exchange through shared memory.

Within one host: all_reduce, reduce, broadcast, all_gather, gather, reduce_scatter and barrier. With several hosts
all_reduce, reduce, broadcast and barrier are hierarchical: shared memory within a host, gloo between the first ranks of
the hosts. Everything else goes to an inner gloo group (docs/shm.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import ProcessGroup, ReduceOp, Work

from lockstep.parallel import monitored, shm_meet
from lockstep.parallel.done import Done
from lockstep.parallel.pending import Pending, Progress
from lockstep.parallel.shm_base import PythonGroup, gloo_group
from lockstep.parallel.shm_local import Local
from lockstep.parallel.shm_quick import NOTHING
from lockstep.parallel.shm_reduce import OPERATIONS, SUM, divide, operation_of, wider
from lockstep.parallel.shm_segment import NAP_S, YIELD_S, Need
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
from lockstep.parallel.untraced import untraced

NAME = "lockstep_shm"
Steps = Generator[Need | Work, None, None]
"""A collective under way: it yields what it has to wait for."""


def register() -> str:
    """Make the backend known to torch.distributed; returns the name for `init_process_group`."""
    shm_meet.check_machine()
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
        monitored.allow(NAME)
    return NAME


def _create(options: Any, backend_options: Any = None) -> ShmGroup:
    return ShmGroup(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        list(options.global_ranks_in_group) or list(range(options.group_size)),
    )


@untraced
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
        self._progress = Progress("lockstep-shm")

    # From the steps of a collective to what torch waits for.

    def _run(self, steps: Iterator[Need | Work], result: Any, opts: Any) -> Work | None:
        """Carry it out here; or, where another rank is late and the caller does not wait for it, behind the caller's back: it
        may be just what that rank is waiting for. Handing it over at once would cost more than most collectives take."""
        brief = getattr(opts, "asyncOp", True)
        need: Need | Work | None = None
        if not self._progress.queue:
            for need in steps:
                if not self._wait(need, brief):
                    break
            else:
                # A caller who waits anyway takes None for "done", and making a Work takes a microsecond of the ten.
                return Done(result) if brief else None

        def rest() -> None:
            for missing in steps if need is None else chain((need,), steps):
                if isinstance(missing, tuple):
                    self._local.sleep_until(missing)
                else:
                    missing.wait()

        return self._progress.add(Pending(rest, result, "shm"))

    def _wait(self, need: Need | Work, brief: bool) -> bool:
        if isinstance(need, tuple):
            return self._local.wait(need, brief)
        until = time.monotonic() + YIELD_S
        while brief and not need.is_completed():
            if time.monotonic() > until:
                return False
            time.sleep(NAP_S)
        need.wait()
        return True

    # Collectives in shared memory.

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        number = operation_of(ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts))
        tensors = listed(tensors)
        if number == SUM and self._one_host and len(tensors) == 1 and not self._progress.queue:
            brief = getattr(opts, "asyncOp", True)
            left = self._local.quick_sum(tensors[0], brief)
            if left is NOTHING:
                return Done(tensors) if brief else None
            if left is not None:
                return self._run(left, tensors, opts)
        return self._run(self._all_reduce(tensors, number, opts), tensors, opts)

    allreduce_coalesced = allreduce

    def _all_reduce(self, tensors: Tensors, number: int, opts: Any) -> Steps:
        for tensor in tensors:
            if tensor.layout is not torch.strided:
                yield self._inner.allreduce([tensor], opts)
                continue
            flat = flat_of(tensor)
            if self._one_host:
                yield from self._local.all_reduce(flat, number)
            else:
                yield from self._all_reduce_over_hosts(flat, number)
            put_back(flat, tensor)

    def _all_reduce_over_hosts(self, flat: torch.Tensor, number: int) -> Steps:
        """Within each host to its first rank, between the first ranks, and back."""
        average = OPERATIONS[number].average
        if average:
            number = SUM
        wide = flat.to(wider(flat.dtype))
        yield from self._local.reduce(wide, number, 0)
        if self._between is not None:
            options = dist.AllreduceOptions()
            options.reduceOp = ReduceOp(ReduceOp.RedOpType(number))
            yield self._between.allreduce([wide], options)
            if average:
                divide(wide, self._size)
        yield from self._local.broadcast(wide, 0)
        if wide is not flat:
            flat.copy_(wide)

    def reduce(self, tensors: Any, opts: Any = None, **_: Any) -> Any:
        tensors = listed(tensors)
        return self._run(self._reduce(tensors, operation_of(opts.reduceOp), opts.rootRank), tensors, opts)

    def _reduce(self, tensors: Tensors, number: int, root: int) -> Steps:
        for tensor in tensors:
            flat = flat_of(tensor)
            if self._one_host:
                yield from self._local.reduce(flat, number, root)
            else:
                copy = flat.clone()
                yield from self._all_reduce_over_hosts(copy, number)
                if self._rank == root:
                    flat.copy_(copy)
            if self._rank == root:
                put_back(flat, tensor)

    def broadcast(self, tensors: Any, opts: Any = None, **_: Any) -> Any:
        tensors = listed(tensors)
        return self._run(self._broadcast(tensors, opts.rootRank), tensors, opts)

    def _broadcast(self, tensors: Tensors, root: int) -> Steps:
        for tensor in tensors:
            flat = flat_of(tensor)
            data = bytes_of(flat)
            if self._one_host:
                yield from self._local.broadcast(data, root)
            else:
                yield from self._broadcast_over_hosts(data, root)
            if self._rank != root:
                put_back(flat, tensor)

    def _broadcast_over_hosts(self, data: torch.Tensor, root: int) -> Steps:
        home = self._host_of[root]
        if self._host == home:
            yield from self._local.broadcast(data, self._members.index(root))
        if self._between is not None:
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = home, 0
            yield self._between.broadcast([data], options)
        if self._host != home:
            yield from self._local.broadcast(data, 0)

    def barrier(self, opts: Any = None, **_: Any) -> Any:
        return self._run(self._barrier(), [], opts)

    def _barrier(self) -> Steps:
        yield from self._local.barrier()
        if not self._one_host:
            if self._between is not None:
                yield self._between.barrier()
            yield from self._local.barrier()

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that says who has not come (monitored.py)."""
        inner: Any = self._inner  # torch's stubs do not list the method
        inner.monitored_barrier(timeout, wait_all_ranks)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        inputs = listed(inputs)
        return self._run(self._gather_all(outputs, inputs), outputs, opts)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        # torch lists the outputs by rank here, not by tensor.
        by_tensor = list(zip(*outputs, strict=True))
        return self._run(self._gather_all(by_tensor, inputs), outputs, opts)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        return self._run(self._gather_single([output], [tensor]), [output], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        return self._run(self._gather_single(outputs, inputs), outputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, **_: Any) -> Any:
        root = opts.rootRank
        places = outputs[0] if self._rank == root else []
        return self._run(self._gather(places, listed(inputs)[0], root), outputs, opts)

    def _gather_all(self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Tensors) -> Steps:
        for outs, tensor in zip(outputs, inputs, strict=True):
            yield from self._gather(outs, tensor, None)

    def _gather_single(self, outputs: Tensors, inputs: Tensors) -> Steps:
        for output, tensor in zip(outputs, inputs, strict=True):
            flat = flat_of(output)
            yield from self._gather(parts_of(flat, self._size), tensor, None)
            put_back(flat, output)

    def _gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int | None) -> Steps:
        """Everybody's tensors into the outputs, of which only the root has some, or all have."""
        data = bytes_of(flat_of(tensor))
        flats = [flat_of(output) for output in outputs]
        places = [bytes_of(flat) for flat in flats]
        if self._one_host:
            yield from self._local.gather(places, data, root)
        elif root is None:
            yield self._inner.allgather([places], [data])
        else:
            options = dist.GatherOptions()
            options.rootRank = root
            yield self._inner.gather([places] if places else [], [data], options)
        for flat, output in zip(flats, outputs, strict=True):
            put_back(flat, output)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        outputs = listed(outputs)
        return self._run(self._reduce_scatter(outputs, inputs, opts), outputs, opts)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        parts = [parts_of(flat_of(tensor), self._size) for tensor in inputs]
        return self._run(self._reduce_scatter(outputs, parts, opts), outputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Steps:
        number = operation_of(ReduceOp.SUM if opts is None else opts.reduceOp)
        for output, given in zip(outputs, inputs, strict=True):
            flat = flat_of(output)
            if self._one_host:
                yield from self._local.reduce_scatter(flat, [flat_of(part) for part in given], number)
            else:
                whole = torch.cat([flat_of(part) for part in given])
                yield from self._all_reduce_over_hosts(whole, number)
                flat.copy_(parts_of(whole, self._size)[self._rank])
            put_back(flat, output)

    # Collectives that are gloo's. Data travel as bytes, because gloo does not know every type.

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, **_: Any) -> Any:
        given = inputs[0] if self._rank == opts.rootRank else []
        return self._run(self._scatter(listed(outputs)[0], given, opts.rootRank), outputs, opts)

    def _scatter(self, output: torch.Tensor, given: Tensors, root: int) -> Steps:
        flat = flat_of(output)
        options = dist.ScatterOptions()
        options.rootRank = root
        parts = [[bytes_of(flat_of(tensor)) for tensor in given]] if given else []
        yield self._inner.scatter([bytes_of(flat)], parts, options)
        put_back(flat, output)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        return self._run(self._all_to_all(outputs, inputs), outputs, opts)

    def _all_to_all(self, outputs: Tensors, inputs: Tensors) -> Steps:
        flats = [flat_of(output) for output in outputs]
        sent = [bytes_of(flat_of(tensor)) for tensor in inputs]
        sizes = [flat.nbytes for flat in flats]
        received = torch.empty(sum(sizes), dtype=torch.uint8)
        yield self._inner.alltoall_base(received, torch.cat(sent), sizes, [data.numel() for data in sent])
        for flat, output, data in zip(flats, outputs, torch.split(received, sizes), strict=True):
            bytes_of(flat).copy_(data)
            put_back(flat, output)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: list[int] | None = None,
        input_splits: list[int] | None = None,
        opts: Any = None,
    ) -> Any:
        outputs, inputs = rows_of(output, output_splits, self._size), rows_of(tensor, input_splits, self._size)
        return self._run(self._all_to_all(outputs, inputs), [output], opts)

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
        self._local.give_up("it was shut down")
        self._progress.end()
        self._local.close()
        self._gloo = self._between = None

    abort = shutdown
