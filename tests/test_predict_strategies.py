"""`lockstep predict` of strategies that send more than one sum: what the model says they send beside what the real ones do, and what it takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lockstep.launch.emulated.link import parse_link
from lockstep.placement import Placement
from lockstep.predict import fit as fits
from lockstep.predict import layers
from lockstep.predict.exchange import Cluster, Cost, Software, cost_of
from lockstep.predict.fit import Measured
from lockstep.predict.messages import Gradient, Message, Norm, exposed, low_rank, messages
from lockstep.predict.model import Case, bare, divided, path, predict
from lockstep.predict.replay import replay, script_of
from lockstep.recipe import Recipe
from test_predict import ALPHA, BETA, planted, software

NETS = Path(layers.__file__).with_name("nets.py")
SYNCHRONISED = {"data": "embedded", "regularize": {"batch_norm": "synchronised"}}
TRANSFORMER = {"data": "embedded", "model": f"{NETS}:Transformer"}
RESNET = {"data": "embedded-color", "model": f"{NETS}:resnet"}
SHAPES = {"embedded": [1, 28, 28], "embedded-color": [3, 32, 32]}


@pytest.mark.parametrize(
    ("recipe", "placement"),
    [
        (SYNCHRONISED, {"strategy": "ddp", "ranks": 4}),
        (SYNCHRONISED, {"strategy": "ddp", "ranks": 3, "accumulation": 3}),
        (SYNCHRONISED, {"strategy": "fsdp", "ranks": 4}),
        (SYNCHRONISED, {"strategy": "fsdp", "ranks": 7, "accumulation": 2}),
        (TRANSFORMER, {"strategy": "fsdp", "ranks": 5}),
        (TRANSFORMER, {"strategy": "ddp", "ranks": 8, "ddp": {"hook": "powersgd", "powersgd_rank": 2}}),
        (TRANSFORMER, {"strategy": "ddp", "ranks": 2, "ddp": {"hook": "powersgd", "bucket_mb": 0.2}}),
        (TRANSFORMER, {"strategy": "ddp", "ranks": 2, "ddp": {"hook": "bf16", "bucket_mb": 0.2}}),
        (RESNET, {"strategy": "naive", "ranks": 6, "zero": True}),
        (SYNCHRONISED, {"strategy": "ddp", "ranks": 64, "zero": True}),
    ],
)
def test_messages_are_those_of_the_real_strategies(recipe: dict[str, Any], placement: dict[str, Any]) -> None:
    question = {"recipe": recipe, "placement": placement, "shape": SHAPES[recipe["data"]]}
    argv = [sys.executable, str(Path(__file__).with_name("counting.py")), json.dumps(question)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    seen = [(name, size) for name, size in json.loads(done.stdout)]
    asked = msgspec.convert({"device": "cpu", **placement}, Placement)
    known = layers.ask(layers.Question(recipe=msgspec.convert(recipe, Recipe), placement=asked))
    told = messages(asked, known.gradients, known.norms, asked.accumulation or 1)
    for collective in ("all_reduce", "all_gather", "reduce_scatter"):
        sizes = sorted(message.bytes for message in told if message.collective == collective)
        # `naive` says with each gradient whether it has it.
        flag = 4 if asked.strategy == "naive" else 0
        real = sorted(size - flag for name, size in seen if name == collective)
        assert sizes == pytest.approx(real), collective
    told_by_owners = [message.bytes for message in told if message.collective == "broadcast"]
    assert bool(told_by_owners) == asked.zero
    if asked.zero:  # owners differ in size, all of them together do not; buffers come before them
        weights = [size for name, size in seen if name == "broadcast"][-len(told_by_owners) :]
        assert sum(told_by_owners) == pytest.approx(sum(weights))


def test_a_gradient_is_compressed_where_torch_does_it() -> None:
    from lockstep.torch_private import powersgd_compresses

    for rows, columns in ((1, 1), (5, 1), (4, 5), (8, 9), (10, 784), (96, 49), (3, 3)):
        for rank in (1, 2, 4, 16):
            thin = min(rows, columns, rank)
            whole, left, right = low_rank(
                [Gradient(bytes=4 * rows * columns, ready=1, rows=rows, columns=columns)], rank
            )
            if powersgd_compresses(rows, columns, thin, 2):
                assert (whole, left, right) == pytest.approx((0, 4 * thin * rows, 4 * thin * columns))
            else:
                assert (whole, left, right) == (4 * rows * columns, 0, 0)


def of(collective: str, backend: str = "gloo") -> Software:
    return msgspec.structs.replace(software(backend), collective=collective)


def test_other_collectives_are_half_a_ring_or_half_a_tree() -> None:
    link, size, delay, rate = parse_link("1gbit,1ms"), 8e6, 1e-3, 1e9 / 8

    def far(hop: float, part: float, trips: int) -> float:
        return hop + (trips * max(1.0, part / (2 << 20) if trips == 2 else 1.0) + 0.7) * delay + part / rate

    for backend, collective, count, trips, measured in (
        ("gloo", "all_gather", 7, 2, ALPHA),  # one hop between two ranks
        ("gloo", "reduce_scatter", 14, 2, ALPHA / 2),  # gloo's is an all-reduce
        ("mpi", "all_gather", 7, 1, ALPHA),
        ("mpi", "reduce_scatter", 7, 1, ALPHA),
    ):
        found = cost_of(Cluster(8, 1, link, of(collective, backend)), "tree", size).seconds
        assert found == pytest.approx(count * far(measured, size / 8, trips), rel=1e-2), (backend, collective)
    near = ALPHA + size / BETA
    found = cost_of(Cluster(5, 4, link, of("broadcast", "mpi")), "auto", size).seconds
    assert found == pytest.approx(2 * near + 3 * far(ALPHA, size, 1), rel=1e-2), "3 levels of hosts, 2 within each"
    assert cost_of(Cluster(1, 2, link, of("broadcast")), "auto", size).seconds == pytest.approx(near, rel=1e-3)


def test_what_computing_waits_for_is_never_hidden() -> None:
    def took(message: Message) -> Cost:
        return Cost(message.bytes, 0.0)

    gathered, summed = Message(bytes=2, ready=0.5, waits=True), Message(bytes=3, ready=0.25)
    assert exposed([gathered], 8.0, took) == 2
    assert exposed([summed, gathered], 8.0, took) == 2 + 1, "it comes when 2 of 8 are left of the other: 1 of 3"
    late = Message(bytes=3, ready=1.0)
    assert exposed([gathered, late], 8.0, took) == 2 + 3
    one, two = (Message(bytes=3, ready=ready, after_others=True) for ready in (0.5, 0.75))
    assert exposed([one], 8.0, took) == 0
    assert exposed([one, two], 8.0, took) == 2, (
        "the second waits 1 for the first, then 2 seconds of backward hide 2 of 3"
    )


NEW: dict[str, dict[str, Any]] = {
    "fsdp": {"strategy": "fsdp"},
    "zero": {"strategy": "ddp", "zero": True},
    "powersgd": {"strategy": "ddp", "ddp": {"hook": "powersgd", "bucket_mb": 0.05}},
    "bf16": {"strategy": "ddp", "ddp": {"hook": "bf16", "bucket_mb": 0.05}},
    "synchronised": {"strategy": "ddp"},
}


def fitted(name: str) -> fits.Fit:
    """Three layers of some size, and a fit that has measured everything that a strategy of this name sends."""
    placement = msgspec.convert(msgspec.to_builtins(planted().placement) | NEW[name], Placement)
    gradients = [
        Gradient(bytes=4 * rows * columns, ready=ready, rows=rows, columns=columns, unit=unit)
        for unit, (rows, columns, ready) in enumerate([(16, 1600, 1.0), (100, 300, 0.6), (10, 100, 0.1)])
    ]
    return planted(
        placement=placement,
        gradients=gradients,
        norms=[Norm(channels=16, ready=0.9)] if name == "synchronised" else [],
        updates=[(1, 1.0), (2, 0.6), (4, 0.4), (64, 0.22)] if name in ("fsdp", "zero") else [],
        software=[of(collective) for collective in ("all_reduce", "all_gather", "reduce_scatter", "broadcast")],
        together=[Measured(samples=16, seconds=0.02, beyond=0.01, spread=1e-3)],
    )


@pytest.mark.parametrize("name", NEW)
@pytest.mark.parametrize(("hosts", "per_host"), [(1, 2), (2, 1), (8, 1), (16, 2), (3, 4)])
def test_without_noise_the_replay_is_the_closed_form(name: str, hosts: int, per_host: int) -> None:
    made = fitted(name)
    made = msgspec.structs.replace(made, compute=msgspec.structs.replace(made.compute, ranks=max(2, per_host)))
    for link, passes in (("10gbit,50us", 1), ("100mbit,5ms", 1), ("1gbit,1ms", 3)):
        case = Case(32, passes, hosts, per_host, link=parse_link(link))
        assert replay(script_of(made, case), 4).step == pytest.approx(predict(made, case).seconds, rel=0.01)


@pytest.mark.parametrize("name", NEW)
def test_the_ranks_that_were_measured_take_what_was_measured(name: str) -> None:
    made = fitted(name)
    case = Case(micro=16, per_host=2)
    parts = made.parts(16, 1, 2)
    apart = parts.compute + parts.wrapper + parts.contention
    assert predict(made, case).seconds == pytest.approx(apart + 0.01), "0.01 s beyond ranks that exchange nothing"


def test_a_step_of_each_by_hand() -> None:
    """Between 4 hosts of one rank, without a rate: a message costs its hops."""
    link = parse_link("10ms")
    free = [
        msgspec.structs.replace(one, points=[(4.0, 1e-9), (1e9, 2e-9), (2e9, 3e-9)]) for one in fitted("fsdp").software
    ]

    def exchange(name: str, passes: int = 1) -> float:
        made = msgspec.structs.replace(fitted(name), software=free, together=[])
        return bare(made, Case(1, passes, 4, 1, link=link)).exchange

    def delays(part: float) -> float:
        """Two a hop, and up to 0.7 more for what TCP spreads."""
        return 10e-3 * (2 + 0.7 * min(1.0, max(0.0, part - 14480) / (24000 - 14480)))

    sizes = [4 * 1600 * 16, 4 * 300 * 100, 4 * 100 * 12]  # ten rows fill up to twelve
    ring = [delays(size / 4) for size in sizes]
    assert exchange("fsdp") == pytest.approx(sum((3 + 3 + 6) * hop for hop in ring), rel=1e-3)
    assert exchange("fsdp", 3) == pytest.approx(sum((3 + 6) * hop for hop in ring), rel=1e-3), "weights stay whole"
    whole = 4 * (1600 * 16 + 300 * 100 + 100 * 10)
    # Three owners' trees of two levels, two at a time. All have asked before the first level is over.
    trees = 3 * (2 * delays(whole / 3) - 10e-3) / 2
    assert exchange("zero") == pytest.approx(6 * delays(whole / 4) + trees, rel=1e-3)
    far = msgspec.structs.replace(fitted("zero"), software=free, together=[])
    beyond = bare(far, Case(1, 1, 64, 1, link=link)).exchange - 126 * delays(whole / 64)
    tree, follower = 6 * delays(whole / 3) - 6 * 20e-3 + 7 * 10e-3, 2 * delays(whole / 3) - 10e-3
    assert beyond == pytest.approx((2 * tree + follower) / 2, rel=1e-3), "a third one waits for fewer"
    norms = exchange("synchronised") - 6 * delays(whole / 4)
    assert norms == pytest.approx(2 * 6 * 20e-3, rel=1e-2), "once in forward, once in backward"
    assert exchange("synchronised", 3) - 6 * delays(whole / 4) == pytest.approx(6 * 6 * 20e-3, rel=1e-2)
    # Two buckets of three messages, all of them small; of each the first is empty, and gloo does not send it.
    assert exchange("powersgd") == pytest.approx(2 * 2 * 6 * 20e-3, rel=1e-2)


def test_a_part_is_updated_sooner_than_the_whole() -> None:
    made = fitted("zero")
    optimizer = 2e-4
    assert divided(made, Case(8, per_host=2)) == pytest.approx(optimizer * (0.6 - 1))
    assert divided(made, Case(8, hosts=3)) == pytest.approx(optimizer * (0.4 + 0.2 * (1 / 3 - 1 / 4) / (1 / 4) - 1))
    assert divided(made, Case(8, hosts=4096)) == pytest.approx(optimizer * (0.22 - 1)), "no further than was measured"
    assert divided(made, Case(8, per_host=2, every=4)) == 0, "local SGD divides nothing"
    assert divided(planted(), Case(8, per_host=2)) == 0


def test_hops_of_a_step() -> None:
    zero, fsdp = (path(fitted(name), Case(8, hosts=4)) for name in ("zero", "fsdp"))
    assert zero.hops == 2 * 3 + 3 * 2 / 2, "a ring, and three trees, two at a time"
    assert (zero.messages, zero.trips) == (1 + 3 / 2, 12 + 3 * 3 / 2)
    assert (fsdp.messages, fsdp.hops, fsdp.trips) == (9, 3 * (3 + 3 + 6), 3 * (6 + 6 + 12))


def gloo_broadcasts(ranks: int, count: int) -> float:
    """Delays of a series of broadcasts from one rank after the other, with two threads a rank, event by event; whoever receives asks."""
    free = [[0.0, 0.0] for _ in range(ranks)]
    for root in range(count):
        start = [min(threads) for threads in free]
        have, done = {root: start[root]}, list(start)
        for place in range(1, ranks):  # a rank's parent has its highest bit cleared
            rank, parent = ((each + root) % ranks for each in (place, place ^ (1 << (place.bit_length() - 1))))
            leaves = max(have[parent], start[rank] + 1)
            done[parent] = max(done[parent], leaves)
            have[rank] = done[rank] = leaves + 1
        for rank, threads in enumerate(free):
            threads[threads.index(start[rank])] = done[rank]
    return max(map(max, free))


def test_a_series_of_broadcasts() -> None:
    for ranks, owners in (
        (2, 2),
        (3, 3),
        (4, 4),
        (6, 6),
        (8, 8),
        (16, 16),
        (16, 6),
        (64, 64),
        (64, 8),
        (64, 20),
        (256, 30),
    ):
        made = fitted("zero")
        gradients = [msgspec.structs.replace(made.gradients[0], bytes=400)] * owners
        made = msgspec.structs.replace(made, gradients=gradients)
        ring = path(
            msgspec.structs.replace(made, placement=msgspec.structs.replace(made.placement, zero=False)),
            Case(8, hosts=ranks),
        )
        series = path(made, Case(8, hosts=ranks)).trips - ring.trips
        assert series == pytest.approx(gloo_broadcasts(ranks, owners), rel=0.13), (ranks, owners)


def test_layers_say_what_a_strategy_needs_to_know() -> None:
    recipe = msgspec.convert(SYNCHRONISED, Recipe)
    found = layers.ask(layers.Question(recipe=recipe, placement=Placement(strategy="fsdp", ranks=2, device="cpu")))
    assert [(one.rows, one.columns) for one in found.gradients] == [
        (4, 9),
        (4, 1),
        (4, 1),
        (8, 36),
        (8, 1),
        (8, 1),
        (10, 392),
        (10, 1),
    ]
    assert len({one.unit for one in found.gradients}) == 5
    assert [norm.channels for norm in found.norms] == [4, 8]
    assert found.norms[0].ready > found.norms[1].ready, "backward comes to the second first"
    assert [ranks for ranks, _ in found.updates] == list(layers.PARTS)
    assert found.updates[0][1] == 1.0
    assert all(share > 0 for _, share in found.updates)
