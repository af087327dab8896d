"""The backend shm in real processes: every collective against a computation by hand, faults, and whole runs."""

from __future__ import annotations

import gc
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from lockstep.backends.group import is_peer_loss
from lockstep.backends.shm import meet as shm_meet
from lockstep.backends.shm import segment as shm_segment
from lockstep.backends.shm.group import ShmGroup
from lockstep.errors import InputError
from shm_rank import Session, numbers
from support import SHORT, Cli, processes_of, wait_for

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
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
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
    # Between hosts gloo adds up in an order of its own: there the sum differs from the order of ranks by rounding.
    if len(set(session.hosts)) > 1 and dtype.is_floating_point:
        torch.testing.assert_close(results[0], expected, rtol=2e-2 if dtype.itemsize == 2 else 1e-5, atol=1e-5)
    else:
        assert same(results[0], expected)


def test_the_short_way_gives_the_bits_of_the_long_way(session: Session) -> None:
    """A row that is summed again goes another way (shm_quick.py); so does one that lies where another one lay."""
    code = """
result = []
for turn in range(4):
    data = numbers(8 + turn, rank, count, dtype)
    if turn: memory.copy_(data)
    else: memory = data
    dist.all_reduce(memory); result.append(memory.clone())
    dist.all_reduce(memory.view(3, -1), dist.ReduceOp.MAX); dist.all_reduce(memory[: count // 3]); result.append(memory.clone())
"""
    for dtype, count in ((torch.float32, 4266), (torch.float64, 8190), (torch.float32, 16_386), (torch.int32, 300)):
        results = session.run(code, count=count, dtype=dtype)
        assert all(all(map(same, result, results[0])) for result in results)
        if len(set(session.hosts)) > 1:
            continue
        for turn in range(4):
            total = by_hand([numbers(8 + turn, rank, count, dtype) for rank in session.ranks], "SUM")
            assert same(results[0][2 * turn], total)
            total[: count // 3] = by_hand([total[: count // 3]] * len(session.ranks), "SUM")
            assert same(results[0][2 * turn + 1], total)


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
            assert all(
                same(got, part + shift if shift else part) for got, part in zip(crossed, all_of_them, strict=True)
            )
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


def test_messages_and_other_groups_while_a_collective_is_under_way(session: Session) -> None:
    """A rank that does not wait for its collective goes on, so it can do what the others need before they come to theirs."""
    code = """
both = dist.new_group()
again = torch.empty(50)
for turn in range(4):  # the same memory, so that the short way is gone too (shm_quick.py)
    again.copy_(numbers(7, rank, 50, torch.float32)); word = torch.zeros(1)
    if rank == 0:
        work = dist.all_reduce(again, async_op=True)
        for other in range(1, ranks): dist.send(torch.tensor([7.0]), other)
        work.wait()
    else:
        dist.recv(word, 0); dist.all_reduce(again)
for turn in range(2):
    mine = numbers(6, rank, 50, torch.float32)
    big = torch.full((300_001,), rank + 1.0); sent = torch.full((4,), float(rank)); cut = torch.zeros(2); rows = torch.zeros(ranks * 3)
    if rank == 0:
        works = [dist.broadcast(sent, 0, async_op=True), dist.all_reduce(mine, async_op=True), dist.all_reduce(big, async_op=True),
            dist.scatter(cut, [torch.full((2,), float(r)) for r in range(ranks)], 0, async_op=True),
            dist.all_gather_into_tensor(rows, torch.zeros(3), async_op=True)]
        assert not works[-1].is_completed(), "the others have not come yet"
        assert dist.all_reduce(torch.ones(1), async_op=True, group=both) is not None
        futures = [work.get_future() for work in works]
        for other in range(1, ranks): dist.send(torch.tensor([7.0]), other)
        works[1].wait(); [future.wait() for future in futures]
        assert all(work.is_completed() and work.is_success() for work in works)
    else:
        word = torch.zeros(1); dist.recv(word, 0); assert word.item() == 7
        dist.all_reduce(torch.ones(1), group=both)
        dist.broadcast(sent, 0); dist.all_reduce(mine); dist.all_reduce(big); dist.scatter(cut, None, 0)
        dist.all_gather_into_tensor(rows, torch.full((3,), float(rank)))
    dist.all_reduce(word := torch.ones(2))
    assert (word[0].item(), sent.tolist(), cut.tolist()) == (ranks, [0.0] * 4, [float(rank)] * 2), (word, sent, cut)
result = again, mine, big, rows
"""
    ranks = session.ranks
    for again, mine, big, rows in session.run(code):
        for seed, total in ((7, again), (6, mine)):  # between hosts gloo adds in an order of its own
            expected = by_hand([numbers(seed, rank, 50, torch.float32) for rank in ranks], "SUM")
            torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-6)
        assert big.eq(sum(rank + 1 for rank in ranks)).all()
        assert rows.equal(torch.arange(float(len(ranks))).repeat_interleave(3))


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


def test_flat_exchanges_all_gradients_and_leaves_alone_what_no_rank_has(session: Session) -> None:
    code = """
from lockstep.strategies.flat import Flat
from lockstep.placement import Placement
torch.manual_seed(rank)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(2, 4, 3); self.norm = torch.nn.BatchNorm2d(4); self.half = torch.nn.Linear(4, 2, dtype=torch.float64)
        self.first_only = torch.nn.Parameter(torch.ones(3)); self.unused = torch.nn.Parameter(torch.ones(5))
net = Net().to(memory_format=torch.channels_last)
flat = Flat(net, Placement(ranks=ranks), torch.device("cpu"))
for p in net.parameters():
    if p is not net.unused and (p is not net.first_only or rank == 0):
        p.grad = torch.full_like(p, rank + 1.0)
net.norm.running_mean.fill_(rank + 5.0)
flat.exchange()
result = ([p.detach().clone() for p in net.parameters()], [None if p.grad is None else p.grad.clone() for p in net.parameters()],
    [p.grad is None or p.grad.stride() == p.stride() for p in net.parameters()], net.norm.running_mean, net.unused.grad is None, net.first_only.grad)
"""
    results = session.run(code)
    total = sum(rank + 1.0 for rank in session.ranks)
    for weights, gradients, strides, mean, unused, first_only in results:
        assert all(map(same, weights, results[0][0])), "all start from rank 0's weights"
        assert unused
        assert first_only.eq(1).all(), "only rank 0 had it"
        assert all(strides), "the optimizer's kernel reads gradients in the order of the weights"
        assert sum(gradient is not None and bool(gradient.eq(total).all()) for gradient in gradients) == 6
        assert mean.eq(5).all(), "buffers are rank 0's"


@pytest.fixture
def faulty(folder: Path, request: pytest.FixtureRequest) -> Iterator[Session]:
    """Three ranks of one host that wait two seconds for each other."""
    opened = Session(folder, 3, hosts="fff", timeout=2, name=request.node.name)
    try:
        assert opened.run("result = rank") == [0, 1, 2]
        yield opened
    finally:
        opened.kill()


@pytest.mark.cold
def test_a_killed_rank_is_named_at_once_and_leaves_nothing(faulty: Session) -> None:
    pids = faulty.run("import os; result = os.getpid()")
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in pids]
    assert all("/memfd:lockstep-shm (deleted)" in text for text in maps), "they share memory"
    assert not any("/dev/shm/" in text for text in maps), "that has no name which could be left behind"
    os.kill(pids[1], signal.SIGKILL)
    faulty.send("dist.all_reduce(torch.ones(10))")
    for rank in (0, 2):
        kind, message = faulty.receive(rank)
        assert kind == "RuntimeError"
        assert message == f"Connection closed by peer: rank 1 (pid {pids[1]}) has ended"
        assert is_peer_loss(RuntimeError(message))
    # A group that has lost a rank does not compute with what is left.
    faulty.send("dist.barrier()")
    assert "broken: Connection closed by peer: rank 1" in faulty.receive(0)[1]


@pytest.mark.cold
@pytest.mark.slow
def test_a_stopped_rank_is_given_up_after_the_timeout(faulty: Session) -> None:
    os.kill(faulty.processes[2].pid, signal.SIGSTOP)
    faulty.send("dist.barrier()")
    for rank in (0, 1):
        kind, message = faulty.receive(rank)
        assert kind == "RuntimeError"
        assert re.match(r"backend=shm: Timed out waiting 2 s for rank 2 \(pid \d+\)", message)
        assert is_peer_loss(RuntimeError(message))


def test_ranks_that_call_different_collectives_are_told(faulty: Session) -> None:
    faulty.send("dist.all_reduce(torch.ones(10 if rank else 11))")
    assert faulty.receive(0)[1] == (
        "ranks called different collectives: "
        "rank 0 called all_reduce (sum) of 11 float32, rank 1 called all_reduce (sum) of 10 float32"
    )


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("dist.broadcast(torch.ones(4), min(rank, 1))", "broadcast of 16 uint8"),
        ("dist.reduce(torch.ones(4), min(rank, 1))", "reduce (sum) of 4 float32"),
    ],
    ids=["broadcast", "reduce"],
)
def test_ranks_that_name_different_roots_are_told_by_the_next_collective(faulty: Session, call: str, name: str) -> None:
    """Each of two ranks takes itself for the root, so none of them waits for the other."""
    faulty.send(f"{call}; dist.barrier()")
    for rank in (0, 1, 2):
        kind, message = faulty.receive(rank)
        assert kind == "RuntimeError"
        assert f"rank 0 called {name} with root 0" in message
        assert re.search(rf"rank [12] called {re.escape(name)} with root 1", message)


@pytest.mark.cold
@pytest.mark.slow
def test_a_rank_that_is_lost_on_another_host_ends_all(folder: Path) -> None:
    session = Session(folder, 4, hosts="xyxy", timeout=5, name="lost")
    try:
        session.run("result = rank")
        session.processes[3].kill()
        session.send("dist.all_reduce(torch.ones(10)); import os; os._exit(0)")
        for rank in (0, 1, 2):
            answer = session.receive(rank)
            assert answer is not None
            assert is_peer_loss(RuntimeError(answer[1])), answer
            session.processes[rank].kill()  # as a worker does on any error; so the loss reaches the next one
    finally:
        session.kill()


# What a peer may have put into the store before it was lost, and where rank 0 then waits for it.
CARD = {"shm//card/1": json.dumps({"host": "h", "pid": os.getpid(), "cores": [0]})}


@pytest.mark.parametrize(
    ("done", "message"),
    [
        ({}, "Timed out waiting 0.3 s for rank 7 to join the group"),
        (CARD, "Timed out waiting 0.3 s for rank 7 to join the group"),
        (CARD | {"shm//opened/1": ""}, "Wait timeout"),  # gloo's
    ],
    ids=["nothing", "card", "memory opened"],
)
def test_a_start_without_all_ranks_ends_by_the_groups_timeout(
    done: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_HOST_KEY", "h")
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=5))  # for whatever else the store is used
    for key, value in done.items():
        store.set(key, value)
    gc.collect()  # or what earlier tests have left would be given back within this one
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(RuntimeError, match=message) as caught:
        ShmGroup(store, 0, 2, timedelta(seconds=0.3), names=[4, 7])
    assert is_peer_loss(caught.value)
    del caught  # its traceback holds the group
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) == before, "the memory and the handle on the peer are given back"


def test_other_processors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(InputError, match="choose backend=gloo"):
        shm_meet.check_machine()


def test_no_room_for_the_memory_is_said_before_the_start() -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(InputError, match="no room for 1,048,576 bytes"):
            shm_meet._create(1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_network_namespace_is_a_host_of_its_own() -> None:
    words = [sys.executable, "-c", "from lockstep.backends.shm.meet import host_key; print(host_key())"]
    inside = subprocess.run(["unshare", "--net", *words], capture_output=True, text=True)
    if "Operation not permitted" in inside.stderr:
        pytest.skip("making a network namespace needs root")
    assert inside.returncode == 0, inside.stderr
    here = shm_meet.host_key()
    assert inside.stdout.strip() != here
    assert inside.stdout.split("|")[:2] == here.split("|")[:2], "the same machine and boot"


@pytest.mark.parametrize("words", [("ranks=4", "strategy=ddp"), ("ranks=2", "strategy=flat")], ids=" ".join)
def test_runs_compute_what_one_process_computes(module_cli: Cli, alone: Any, words: tuple[str, ...]) -> None:
    run = module_cli.run(*SHORT, "threads=1", "backend=shm", *words)
    assert run["ranks_agree"]
    assert run["train_loss"] == pytest.approx(alone["train_loss"], rel=1e-5)
    assert run["test_loss"] == pytest.approx(alone["test_loss"], rel=1e-5)


@pytest.mark.cold
def test_kill_9_in_a_run_ends_all_and_names_the_rank(cli: Cli) -> None:
    process, run = cli.started(*SHORT, "epochs=100000", "threads=1", "ranks=2", "backend=shm", "strategy=ddp")
    os.kill(int(run.rank_statuses()[1]["pid"]), signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 3, errors
    assert re.match(r"lockstep: run failed: rank 1 was killed by SIGKILL", errors.strip().splitlines()[-1]), errors
    wait_for(lambda: not processes_of(run.folder), what="every process to be gone")
    assert "Connection closed by peer: rank 1" in (run.rank_folder(0) / "log.txt").read_text()
