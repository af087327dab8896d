"""The program of the ranks that test_mpi.py starts: every collective of the backend `mpi` against a count by hand, and
against gloo in the same processes. `mpirun … python mpi_ranks.py FOLDER`; rank 0 prints the names of what was checked.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from lockstep.backends.mpi import group as mpi_group
from lockstep.backends.mpi import segments
from lockstep.backends.mpi import work as mpi_work

MPI = mpi_group.MPI  # imported there, which does not initialize it yet
R = dist.ReduceOp
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
CHECKS: list[Callable[[], None]] = []
LARGE = 1 << 20  # elements: 4 MiB of float32, beyond what is finished inside the call


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS.append(function)
    return function


def me() -> int:
    return dist.get_rank()


def world() -> int:
    return dist.get_world_size()


def numbers(rank: int, dtype: torch.dtype = torch.float32, count: int = 6) -> torch.Tensor:
    """Small numbers that differ by rank and place; sums and products of four of them are exact in every type."""
    return torch.tensor([(2 * rank + place) % 3 + 1 for place in range(count)]).to(dtype)


def everyones(dtype: torch.dtype, count: int = 6) -> torch.Tensor:
    return torch.stack([numbers(rank, torch.float64, count) for rank in range(world())])


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(found, expected.to(found.dtype)), (me(), found, expected)


def random_of(rank: int, count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank))


@check
def all_reduce() -> None:
    for dtype in (*FLOATS, *INTEGERS):
        rows = everyones(dtype)
        expected = {R.SUM: rows.sum(0), R.MAX: rows.amax(0), R.MIN: rows.amin(0), R.PRODUCT: rows.prod(0)}
        if dtype.is_floating_point:
            expected[R.AVG] = rows.sum(0) / world()
        for operation, result in expected.items():
            tensor = numbers(me(), dtype)
            dist.all_reduce(tensor, operation)
            same(tensor, result)


@check
def all_reduce_of_truth_values() -> None:
    rows = torch.stack([numbers(rank) == 1 for rank in range(world())])
    for operation, expected in (
        (R.SUM, rows.any(0)),
        (R.MAX, rows.any(0)),
        (R.PRODUCT, rows.all(0)),
        (R.MIN, rows.all(0)),
    ):
        tensor = numbers(me()) == 1
        dist.all_reduce(tensor, operation)
        same(tensor, expected)


@check
def all_reduce_of_complex_numbers() -> None:
    tensor = torch.complex(numbers(me()), 2 * numbers(me()))
    dist.all_reduce(tensor)  # torch hands it over as real numbers
    rows = everyones(torch.float32).sum(0).float()
    same(tensor, torch.complex(rows, 2 * rows))


@check
def all_reduce_equals_gloo_to_the_bit_with_two_ranks() -> None:
    for dtype in FLOATS:
        ours, theirs = random_of(me(), 4266).to(dtype), random_of(me(), 4266).to(dtype)
        dist.all_reduce(ours)
        dist.all_reduce(theirs, group=GLOO)
        if world() == 2:
            same(ours, theirs)
        else:  # another order of summation
            torch.testing.assert_close(
                ours, theirs, rtol=0.03 if dtype.itemsize == 2 else 1e-5, atol=0.05 if dtype.itemsize == 2 else 1e-5
            )
        everywhere = [torch.empty_like(ours) for _ in range(world())]
        dist.all_gather(everywhere, ours)
        assert all(torch.equal(other, ours) for other in everywhere), "every rank has the same bits"


@check
def not_contiguous() -> None:
    for shape in (lambda t: t.view(2, 3).t(), lambda t: t[::2]):
        tensor, expected = shape(numbers(me())), shape(everyones(torch.float32).sum(0))
        assert not tensor.is_contiguous()
        dist.all_reduce(tensor)
        same(tensor, expected)
        tensor = shape(numbers(me()))
        dist.broadcast(tensor, src=world() - 1)
        same(tensor, shape(numbers(world() - 1)))
        rows = [shape(torch.zeros(6)) for _ in range(world())]
        dist.all_gather(rows, shape(numbers(me())))
        for rank, row in enumerate(rows):
            same(row, shape(numbers(rank)))


@check
def large_ones_overlap_and_keep_their_order() -> None:
    tensors = [torch.full((LARGE,), float(me() + k)) for k in range(4)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    small = numbers(me())
    dist.all_reduce(small)  # overtakes what is under way in this rank; MPI matches calls by their order
    same(small, everyones(torch.float32).sum(0))
    futures = [work.get_future() for work in works[2:]]
    for work in works[:2]:
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
    for future, tensor in zip(futures, tensors[2:], strict=True):
        assert future.wait()[0].data_ptr() == tensor.data_ptr()
    for k, tensor in enumerate(tensors):
        assert tensor.eq(sum(rank + k for rank in range(world()))).all()


@check
def a_large_one_is_under_way_while_the_caller_goes_on() -> None:
    tensor = torch.ones(LARGE)
    if me() == 0:
        work = dist.all_reduce(tensor, async_op=True)
        assert not work.is_completed(), "the others have not come yet"
        torch.ones(1).add_(1)
        GLOO_STORE.set("go", "1")
        assert work.wait()
    else:
        GLOO_STORE.wait(["go"])
        dist.all_reduce(tensor)
    assert tensor.eq(world()).all()


@check
def broadcast() -> None:
    for dtype in (*FLOATS, *INTEGERS, torch.bool, torch.complex64):
        for root in (0, world() - 1):
            tensor = numbers(me()).to(dtype)
            dist.broadcast(tensor, src=root)
            same(tensor, numbers(root).to(dtype))


@check
def all_gather() -> None:
    for dtype in (*FLOATS, *INTEGERS, torch.bool):
        rows = [torch.zeros(6, dtype=dtype) for _ in range(world())]
        dist.all_gather(rows, numbers(me()).to(dtype))
        one = torch.zeros(6 * world(), dtype=dtype)
        dist.all_gather_into_tensor(one, numbers(me()).to(dtype))
        for rank in range(world()):
            same(rows[rank], numbers(rank).to(dtype))
            same(one[6 * rank : 6 * rank + 6], numbers(rank).to(dtype))


@check
def reduce() -> None:
    for dtype in (*FLOATS, *INTEGERS):
        for operation in (R.SUM, R.MAX):
            tensor, root = numbers(me(), dtype), world() - 1
            dist.reduce(tensor, dst=root, op=operation)
            rows = everyones(dtype)
            result = rows.sum(0) if operation == R.SUM else rows.amax(0)
            same(tensor, result if me() == root else numbers(me(), dtype))


@check
def reduce_scatter() -> None:
    count = 3 * world()
    for dtype in (*FLOATS, *INTEGERS):
        expected = everyones(dtype, count).sum(0).view(world(), 3)[me()]
        output = torch.zeros(3, dtype=dtype)
        dist.reduce_scatter(output, list(numbers(me(), dtype, count).view(world(), 3)))
        same(output, expected)
        output.zero_()
        dist.reduce_scatter_tensor(output, numbers(me(), dtype, count))
        same(output, expected)
    output = torch.zeros(3)
    dist.reduce_scatter_tensor(output, numbers(me(), torch.float32, count), R.AVG)
    same(output, everyones(torch.float32, count).sum(0).view(world(), 3)[me()] / world())


@check
def gather_and_scatter() -> None:
    for dtype in (*FLOATS, *INTEGERS, torch.bool):
        root = world() - 1
        rows = [torch.zeros(6, dtype=dtype) for _ in range(world())] if me() == root else None
        dist.gather(numbers(me()).to(dtype), rows, dst=root)
        for rank, row in enumerate(rows or []):
            same(row, numbers(rank).to(dtype))
        output = torch.zeros(6, dtype=dtype)
        dist.scatter(output, [numbers(r + 5).to(dtype) for r in range(world())] if me() == root else None, src=root)
        same(output, numbers(me() + 5).to(dtype))


@check
def all_to_all() -> None:
    for dtype in (*FLOATS, *INTEGERS):
        # To rank r go r + 1 elements that say from whom to whom.
        outputs = [torch.zeros(me() + 1, dtype=dtype) for _ in range(world())]
        dist.all_to_all(outputs, [torch.full((r + 1,), 10 * me() + r, dtype=dtype) for r in range(world())])
        for rank, output in enumerate(outputs):
            same(output, torch.full((me() + 1,), 10 * rank + me()))
        output = torch.zeros(2 * world(), 3, dtype=dtype)
        given = torch.arange(world(), dtype=torch.float64).repeat_interleave(2)[:, None].expand(-1, 3) + 10 * me()
        dist.all_to_all_single(output, given.to(dtype))
        same(output, (10 * torch.arange(world()).repeat_interleave(2)[:, None] + me()).expand(-1, 3))
        rows = [r + 1 for r in range(world())]
        given = torch.cat([torch.full((r + 1, 2), 10 * me() + r, dtype=dtype) for r in range(world())])
        output = torch.zeros((me() + 1) * world(), 2, dtype=dtype)
        dist.all_to_all_single(output, given, [me() + 1] * world(), rows)
        expected = torch.cat([torch.full((me() + 1, 2), 10 * rank + me()) for rank in range(world())])
        same(output, expected)


@check
def send_and_receive() -> None:
    right, left = (me() + 1) % world(), (me() - 1) % world()
    for dtype in (*FLOATS, *INTEGERS, torch.bool):
        # Everyone receives first: nothing may block here.
        room = torch.zeros(6, dtype=dtype)
        coming = dist.irecv(room, left, tag=3)
        going = dist.isend(numbers(me()).to(dtype), right, tag=3)
        coming.wait()
        going.wait()
        same(room, numbers(left).to(dtype))
    large, room = torch.full((LARGE,), float(me())), torch.zeros(LARGE)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, room, left), dist.P2POp(dist.isend, large, right)]):
        work.wait()
    assert room.eq(left).all()
    if me() == 0:
        found = set()
        for _ in range(world() - 1):
            room = torch.zeros(1)
            source = dist.recv(room)
            assert room.item() == source
            found.add(source)
        assert found == set(range(1, world()))
    else:
        dist.send(torch.tensor([float(me())]), 0)


@check
def barrier() -> None:
    time.sleep(0.1 * (me() == world() - 1))
    came = time.time()
    dist.barrier()
    went = time.time()
    times = [torch.zeros(2, dtype=torch.float64) for _ in range(world())]
    dist.all_gather(times, torch.tensor([came, went], dtype=torch.float64))
    assert min(float(t[1]) for t in times) >= max(float(t[0]) for t in times), "nobody left before all had come"


@check
def messages_while_a_collective_is_under_way() -> None:
    """Small ones are carried out in the call, unless another rank is late: it may need what this rank does next."""
    mine = numbers(me())
    if me() == 0:
        works = [dist.all_reduce(mine, async_op=True), dist.barrier(async_op=True)]
        assert not works[0].is_completed()
        for other in range(1, world()):
            dist.send(torch.tensor([7.0]), other)
        for work in works:
            work.wait()
    else:
        word = torch.zeros(1)
        dist.recv(word, 0)
        dist.all_reduce(mine)
        dist.barrier()
    same(mine, everyones(torch.float32).sum(0))


@check
def ranks_that_differ_are_told() -> None:
    odd = me() == 1
    differing: dict[str, Callable[[Any], Any]] = {
        "size": lambda group: dist.all_reduce(torch.ones(10 + odd), group=group),
        "type": lambda group: dist.all_reduce(torch.ones(10, dtype=torch.int32 if odd else torch.float32), group=group),
        "operation": lambda group: dist.all_reduce(torch.ones(10), R.MAX if odd else R.SUM, group=group),
        "root": lambda group: dist.broadcast(torch.ones(4), int(odd), group=group),
        "large": lambda group: dist.all_reduce(torch.ones(LARGE + odd), group=group),
        "kind": lambda group: dist.barrier(group) if odd else dist.broadcast(torch.ones(4), 0, group=group),
    }
    for call in differing.values():
        group = dist.new_group(timeout=timedelta(seconds=20))
        with pytest.raises(RuntimeError, match=rf"backend=mpi: rank {me()} called .*, but rank \d called another"):
            call(group)
        with pytest.raises(RuntimeError, match="this process group is broken"):
            dist.barrier(group)
    if me() == 0:
        dist.send(torch.ones(5), 1)
    if odd:
        with pytest.raises(RuntimeError, match="backend=mpi: recv: rank 0 sent 20 bytes, but the tensor has 28"):
            dist.recv(torch.ones(7), 0)


@check
def the_gate_between_hosts() -> None:
    """These ranks share a host and so another gate; this one is told the same."""
    gate = mpi_work.ReducingGate(MPI.COMM_WORLD)
    for turn in range(3):
        gate.enter(1000 + turn)
        mpi_work.sleep_until(gate.look, 20, "turn")
    gate.enter(1000 + (me() == 1))
    with pytest.raises(mpi_work.Mismatch, match="another rank called another collective"):
        mpi_work.sleep_until(gate.look, 20, "turn")
    gate.close()


@check
def sparse_tensors() -> None:
    tensor = torch.eye(4).mul(me() + 1).roll(me(), 0).to_sparse()
    dist.all_reduce(tensor)
    same(tensor.to_dense(), sum(torch.eye(4).mul(rank + 1).roll(rank, 0) for rank in range(world())))  # type: ignore[arg-type]


@check
def objects() -> None:
    found: list[Any] = [None] * world()
    dist.all_gather_object(found, {"rank": me()})
    assert found == [{"rank": rank} for rank in range(world())]
    words = [f"from {me()}"]
    dist.broadcast_object_list(words, src=world() - 1)
    assert words == [f"from {world() - 1}"]


@check
def subgroups() -> None:
    members = [0, world() - 1]
    ends = dist.new_group(members, backend=mpi_group.register())
    halves = [dist.new_group([rank], backend=mpi_group.register()) for rank in range(world())]
    if me() in members:
        tensor = numbers(me())
        dist.all_reduce(tensor, group=ends)
        same(tensor, numbers(0) + numbers(world() - 1))
        assert dist.get_world_size(ends) == 2
        assert dist.get_rank(ends) == members.index(me())
        dist.broadcast(tensor, src=world() - 1, group=ends)
        dist.destroy_process_group(ends)
    alone = numbers(me())
    dist.all_reduce(alone, group=halves[me()])
    same(alone, numbers(me()))


@check
def data_parallel_equals_gloo() -> None:
    def trained(group: Any, bucket_mb: float) -> list[torch.Tensor]:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(64, 700), nn.ReLU(), nn.Linear(700, 700), nn.ReLU(), nn.Linear(700, 10))
        ddp = nn.parallel.DistributedDataParallel(model, process_group=group, bucket_cap_mb=bucket_mb)
        images, labels = random_of(me(), 8 * 64).view(8, 64), torch.arange(8) % 10
        for _ in range(3):
            model.zero_grad()
            functional.cross_entropy(ddp(images), labels).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad  # type: ignore[operator]
        return [parameter.detach() for parameter in model.parameters()]

    for bucket_mb in (25.0, 0.5):  # in one large piece by the progress thread, and in several
        for ours, theirs in zip(trained(None, bucket_mb), trained(GLOO, bucket_mb), strict=True):
            if world() == 2:
                same(ours, theirs)
            else:
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@check
def what_has_no_meaning_is_refused() -> None:
    for tensor, operation in (
        (torch.ones(2, dtype=torch.int64), R.AVG),
        (torch.ones(2), R.BXOR),
    ):
        with pytest.raises(TypeError, match="backend=mpi"):
            dist.all_reduce(tensor, operation)
    with pytest.raises(ValueError, match="backend=mpi: all_gather"):
        dist.all_gather_into_tensor(torch.zeros(5), torch.zeros(4))


@check
def shared_memory_has_no_name() -> None:
    """So a kill at this moment leaves nothing in /dev/shm."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in line]
    ours = [line for line in lines if any(sign in line for sign in (*segments.NAMES, "lockstep-mpi-"))]
    assert len(ours) >= 2, lines
    assert all(line.endswith("(deleted)") for line in ours), ours


@check
def empty_tensors() -> None:
    tensor = torch.zeros(0)
    dist.all_reduce(tensor)
    dist.broadcast(tensor, src=0)
    rows = [torch.zeros(0) for _ in range(world())]
    dist.all_gather(rows, tensor)
    assert math.prod(rows[-1].shape) == 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    name = mpi_group.register()
    # Singletons, on purpose: what a launcher of another MPI comes to.
    size = int(os.environ.get("PRETEND_WORLD", MPI.COMM_WORLD.size))
    store = dist.FileStore(str(Path(sys.argv[1]) / "rendezvous"), size)
    store.set_timeout(timedelta(seconds=30))
    dist.init_process_group(name, store=store, rank=MPI.COMM_WORLD.rank, world_size=size, timeout=timedelta(seconds=30))
    GLOO = dist.new_group(backend="gloo")
    GLOO_STORE = dist.PrefixStore("test", store)
    for function in CHECKS:
        function()
    dist.barrier()
    if me() == 0:
        library = "openmpi" if MPI.get_vendor()[0] == "Open MPI" else "mpich"
        print(json.dumps({"library": library, "world": world(), "checks": [f.__name__ for f in CHECKS]}), flush=True)
    dist.destroy_process_group()
