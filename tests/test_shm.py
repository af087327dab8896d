"""The backend shm in real processes: every collective against a computation by hand, faults, and whole runs."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from conftest import SHORT, Cli, processes_of, wait_for
from lockstep.errors import InputError
from lockstep.measure.records import read_steps
from lockstep.parallel import flat, shm_meet, shm_segment
from lockstep.parallel.group import is_peer_loss
from lockstep.run import Run
from shm_rank import Session, numbers

if sys.platform != "linux" or os.uname().machine != "x86_64":
    pytest.skip("the shm backend needs Linux on x86", allow_module_level=True)

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
OPS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]
SLOT = shm_segment.SLOT


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shm")


@pytest.fixture(scope="module", params=["aa", "aaa", "aaaa", "abba"])
def session(request: pytest.FixtureRequest, folder: Path) -> Iterator[Session]:
    """2, 3 and 4 ranks of one host, and 2 x 2 of two hosts whose ranks do not lie side by side."""
    hosts: str = request.param
    opened = Session(folder, len(hosts), hosts=hosts)
    try:
        yield opened
        assert opened.close() == [0] * len(hosts), "every rank leaves in order"
    finally:
        opened.kill()


def by_hand(parts: list[torch.Tensor], op: str) -> torch.Tensor:
    """The reduction in the order of ranks, short floats in float32."""
    dtype = parts[0].dtype
    short = dtype in (torch.bfloat16, torch.float16)
    total = parts[0].float() if short else parts[0].clone()
    functions: dict[str, Any] = {
        "SUM": torch.add,
        "AVG": torch.add,
        "PRODUCT": torch.mul,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "BAND": torch.bitwise_and,
        "BOR": torch.bitwise_or,
        "BXOR": torch.bitwise_xor,
    }
    for part in parts[1:]:
        total = functions[op](total, part.float() if short else part)
    if op == "AVG":
        total = total / len(parts) if dtype.is_floating_point else torch.div(total, len(parts), rounding_mode="trunc")
    return total.to(dtype)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """The same bits."""
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and one.reshape(-1).contiguous().view(torch.uint8).equal(other.reshape(-1).contiguous().view(torch.uint8))
    )


cases = some.tuples(
    some.sampled_from(OPS),
    some.sampled_from([*FLOATS, *INTEGERS, torch.bool]),
    some.integers(0, 3000) | some.sampled_from([4266, 16385, 30_000, SLOT // 4 - 1, SLOT // 4 + 1, SLOT + 1]),
    some.integers(0, 10_000),
).filter(
    lambda case: (
        not (case[0].startswith("B") and case[1].is_floating_point) and not (case[0] == "AVG" and case[1] is torch.bool)
    )
)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    database=None,
)
@given(case=cases)
def test_all_reduce_gives_every_rank_the_bits_of_the_sum_in_order(session: Session, case: Any) -> None:
    op, dtype, count, seed = case
    results = session.run(
        "result = numbers(seed, rank, count, dtype); dist.all_reduce(result, getattr(dist.ReduceOp, op))",
        op=op,
        dtype=dtype,
        count=count,
        seed=seed,
    )
    expected = by_hand([numbers(seed, rank, count, dtype) for rank in session.ranks], op)
    assert all(same(result, results[0]) for result in results), "all ranks have the same bits"
    # Between hosts gloo adds up in an order of its own; two hosts of two ranks differ from the order of ranks by rounding.
    if session.processes and len(set(_hosts(session))) > 1 and dtype.is_floating_point:
        torch.testing.assert_close(results[0], expected, rtol=2e-2 if dtype.itemsize == 2 else 1e-5, atol=1e-5)
    else:
        assert same(results[0], expected)


def _hosts(session: Session) -> list[str]:
    return session.run("import os; result = os.environ['LOCKSTEP_HOST_KEY']")


def test_a_repeat_gives_the_same_bits(session: Session) -> None:
    """Also between hosts, also when the ranks come in another order."""
    code = (
        "import time; result = []\n"
        "for turn in range(6):\n"
        "    data = numbers(5, rank, count, torch.float32); time.sleep(0.002 * ((rank + turn) % ranks))\n"
        "    dist.all_reduce(data); result.append(data)\n"
    )
    for count in (1001, 70_001):
        results = [turn for answer in session.run(code, count=count) for turn in answer]
        assert all(same(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.bool], ids=str)
def test_data_go_where_they_belong(session: Session, dtype: torch.dtype) -> None:
    """broadcast, all_gather, gather, scatter, all_to_all, send and recv move bytes of any type, short and long."""
    code = """
mine = numbers(3, rank, count, dtype)
last = ranks - 1
empty = lambda: torch.zeros(count, dtype=dtype)
sent = mine.clone(); dist.broadcast(sent, last)
gathered = [empty() for _ in range(ranks)]; dist.all_gather(gathered, mine)
whole = torch.zeros(ranks * count, dtype=dtype); dist.all_gather_into_tensor(whole, mine)
at_root = [empty() for _ in range(ranks)] if rank == last else None; dist.gather(mine, at_root, last)
parts = [numbers(7, other, count, dtype) for other in range(ranks)]
mine_of = empty(); dist.scatter(mine_of, parts if rank == last else None, last)
crossed = [empty() for _ in range(ranks)]; dist.all_to_all(crossed, [mine + i if dtype is not torch.bool else mine for i in range(ranks)])
single = torch.zeros(ranks * count, dtype=dtype); dist.all_to_all_single(single, torch.cat([mine] * ranks))
round_ = empty()
works = [dist.isend(mine, (rank + 1) % ranks), dist.irecv(round_, (rank - 1) % ranks)]
[work.wait() for work in works]
result = sent, gathered, whole, at_root, mine_of, crossed, single, round_
"""
    ranks = session.ranks
    for count in (0, 5, SLOT // dtype.itemsize + 3):
        all_of_them = [numbers(3, rank, count, dtype) for rank in ranks]
        for rank, result in enumerate(session.run(code, count=count, dtype=dtype)):
            sent, gathered, whole, at_root, mine_of, crossed, single, round_ = result
            assert same(sent, all_of_them[-1])
            assert all(map(same, gathered, all_of_them))
            assert same(whole, torch.cat(all_of_them))
            assert at_root is None if rank != len(ranks) - 1 else all(map(same, at_root, all_of_them))
            assert same(mine_of, numbers(7, rank, count, dtype))
            shift = 0 if dtype is torch.bool else rank
            assert all(same(got, part + shift if shift else part) for got, part in zip(crossed, all_of_them, strict=True))
            assert same(single, torch.cat(all_of_them))
            assert same(round_, all_of_them[rank - 1])


def test_reduce_and_reduce_scatter(session: Session) -> None:
    code = """
mine = numbers(4, rank, ranks * count, torch.int32)
at_root = mine.clone(); dist.reduce(at_root, ranks - 1, dist.ReduceOp.MAX)
part = torch.zeros(count, dtype=torch.int32); dist.reduce_scatter(part, list(mine.split(count)) if count else [mine] * ranks)
single = torch.zeros(count, dtype=torch.int32); dist.reduce_scatter_tensor(single, mine, dist.ReduceOp.AVG)
result = at_root, part, single
"""
    for count in (0, 7, 100_000):
        inputs = [numbers(4, rank, len(session.ranks) * count, torch.int32) for rank in session.ranks]
        total, average = by_hand(inputs, "SUM"), by_hand(inputs, "AVG")
        for rank, (at_root, part, single) in enumerate(session.run(code, count=count)):
            is_root = rank == len(session.ranks) - 1
            assert same(at_root, by_hand(inputs, "MAX") if is_root else inputs[rank]), "others keep what they had"
            assert same(part, total[rank * count : (rank + 1) * count])
            assert same(single, average[rank * count : (rank + 1) * count])


def test_tensors_of_every_shape(session: Session) -> None:
    """Without dimensions, with gaps, transposed, channels-last, wanting a gradient: all are changed in place."""
    code = """
wide = torch.zeros(6, 8); gaps = wide[:, ::2]; gaps.fill_(rank + 1.0); dist.all_reduce(gaps)
turned = torch.arange(6.0).view(2, 3).t() * (rank + 1); dist.all_reduce(turned)
last = torch.full((2, 3, 4, 4), rank + 1.0).to(memory_format=torch.channels_last); dist.broadcast(last, 1)
weight = torch.nn.Parameter(torch.full((3,), rank + 1.0)); dist.all_reduce(weight.detach()); dist.broadcast(weight.data, 0)
leaf = torch.full((3, 2), float(rank), requires_grad=True)
with torch.no_grad(): dist.all_reduce(leaf)
point = torch.tensor(rank + 1); dist.all_reduce(point)
nothing = torch.empty(0, 3); dist.all_reduce(nothing); dist.broadcast(nothing, 0)
spots = torch.zeros(4, ranks)[:, 0]; received = dist.irecv(spots, (rank - 1) % ranks)
dist.isend(torch.zeros(4, 2).add(rank)[:, 1], (rank + 1) % ranks).wait(); received.wait()
objects = [None] * ranks; dist.all_gather_object(objects, {"rank": rank})
complex_ = torch.full((3,), 1 + 1j * rank); dist.all_reduce(complex_)
sparse = torch.eye(3).mul(rank + 1).to_sparse(); dist.all_reduce(sparse)
result = wide, turned, last, weight.detach(), leaf.detach(), point, spots, objects, complex_, sparse.to_dense()
"""
    ranks = len(session.ranks)
    total = ranks * (ranks + 1) / 2
    for rank, answer in enumerate(session.run(code)):
        wide, turned, last, weight, leaf, point, spots, objects, complex_, sparse = answer
        assert wide[:, ::2].eq(total).all()
        assert wide[:, 1::2].eq(0).all(), "the gaps are left alone"
        assert turned.equal(torch.arange(6.0).view(2, 3).t() * total)
        assert last.eq(2).all()
        assert weight.eq(total).all()
        assert leaf.eq(total - ranks).all()
        assert point.item() == total
        assert spots.eq((rank - 1) % ranks).all()
        assert objects == [{"rank": other} for other in session.ranks]
        assert complex_.equal(torch.full((3,), ranks + 1j * (total - ranks)))
        assert sparse.equal(torch.eye(3) * total)


def test_many_outstanding_works_and_their_futures(session: Session) -> None:
    code = """
tensors = [torch.full((50,), float(rank + i)) for i in range(20)]
works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
[work.wait() for work in reversed(works)]
assert all(work.is_completed() for work in works)
again = dist.all_reduce(torch.ones(3), async_op=True).get_future().then(lambda future: future.value()[0] * 2).wait()
result = [tensor[0].item() for tensor in tensors], again[0].item()
"""
    ranks = len(session.ranks)
    for values, again in session.run(code):
        assert values == [sum(session.ranks) + ranks * i for i in range(20)]
        assert again == 2 * ranks


def test_subgroups(session: Session) -> None:
    code = """
ends = dist.new_group([0, ranks - 1]); alone = dist.new_group([1])
result = torch.tensor([float(rank)])
if rank in (0, ranks - 1): dist.all_reduce(result, group=ends)
if rank == 1: dist.all_reduce(result, group=alone); dist.barrier(alone)
dist.barrier(); dist.destroy_process_group(ends) if rank in (0, ranks - 1) else None
"""
    ranks = len(session.ranks)
    values = [result.item() for result in session.run(code)]
    assert values == [ranks - 1 if rank in (0, ranks - 1) else rank for rank in session.ranks]


@pytest.mark.parametrize("buckets", [25, 0.0001], ids=["one bucket", "many buckets"])
def test_ddp_computes_what_one_process_computes(session: Session, buckets: float) -> None:
    train = """
torch.manual_seed(3 + rank * wrapped)
model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
torch.manual_seed(9); images = torch.randn(24, 6)
net = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=buckets) if wrapped else model
share = images[rank * 24 // ranks : (rank + 1) * 24 // ranks] if wrapped else images
for _ in range(5):
    net.zero_grad(); net(share).square().mean().backward()
    with torch.no_grad(): [p.sub_(p.grad, alpha=0.1) for p in model.parameters()]
result = [p.detach().clone() for p in model.parameters()]
"""
    names: dict[str, Any] = {"torch": torch, "rank": 0, "ranks": 1, "wrapped": False, "buckets": buckets}
    exec(train, names)
    results = session.run(train, wrapped=True, buckets=buckets)
    for weights in results:
        assert all(map(same, weights, results[0])), "all ranks end with the same bits"
    for ours, alone in zip(results[0], names["result"], strict=True):
        torch.testing.assert_close(ours, alone, rtol=1e-5, atol=1e-6)
