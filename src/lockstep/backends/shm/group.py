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
from torch.distributed import ReduceOp, Work

from lockstep.backends import python_group
from lockstep.backends.python_group import Tensors
from lockstep.backends.shm import meet
from lockstep.backends.shm.base import NAME, ShmBase, Steps
from lockstep.backends.shm.quick import NOTHING
from lockstep.backends.shm.reduce import OPERATIONS, SUM, divide, operation_of, wider
from lockstep.backends.shm.work import Received, bytes_of, flat_of, listed, parts_of, put_back, rows_of
from lockstep.backends.work import Done
from lockstep.torch_private import untraced


def register() -> str:
    """Make the backend known to torch.distributed; returns the name for `init_process_group`."""
    meet.check_machine()
    return python_group.register(NAME, _create)


def _create(options: Any, backend_options: Any = None) -> ShmGroup:
    return ShmGroup(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        list(options.global_ranks_in_group) or list(range(options.group_size)),
    )


@untraced
class ShmGroup(ShmBase):
    """The collectives."""

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
