"""`lockstep predict`: the arithmetic against independent references, the replay against the closed form, and the command."""

from __future__ import annotations

import itertools
import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from lockstep.backends.costs import between, store
from lockstep.backends.costs.cells import Cell
from lockstep.errors import InputError
from lockstep.launch.emulated.link import Link, parse_link
from lockstep.machine.cores import cores
from lockstep.measure.environment import version_of
from lockstep.placement import LocalSgd, Placement
from lockstep.predict import check, fit, measure, score
from lockstep.predict.compute import Compute, Point, at
from lockstep.predict.exchange import Cluster, Detour, Software, cost_of, hierarchical, ring, tree
from lockstep.predict.fit import Fit, Measured
from lockstep.predict.held import COMMON, GROUPS, Held
from lockstep.predict.here import here
from lockstep.predict.interval import spread
from lockstep.predict.messages import Gradient, Message, buckets, exposed, messages
from lockstep.predict.model import Case, bare, missed, predict
from lockstep.predict.protocol import protocol_of
from lockstep.predict.replay import Script, replay, script_of
from lockstep.predict.ring import around
from lockstep.predict.scaling import Ask, asked_ranks, judge, table, usual_ranks
from lockstep.predict.waiting import noise_of, slowest
from lockstep.recipe import Optimizer, Recipe, Regularize
from support import Cli

ALPHA, BETA = 200e-6, 2e9
"""Of the all-reduce between two ranks that these tests plant: seconds, and bytes a second."""


def software(backend: str = "gloo", ranks: int = 2) -> Software:
    """alpha + bytes / beta, "measured" so densely that what lies between is as good as exact."""
    sizes = [4.0 * 1.1**k for k in range(190)]
    return Software(backend=backend, ranks=ranks, points=[(size, ALPHA + size / BETA) for size in sizes])


def planted(**changes: Any) -> Fit:
    """A fit with round numbers: 1 ms + 0.1 ms a sample alone, a tenth more with a second rank, 17 KB of gradients."""

    def points(factor: float, more: float) -> list[Point]:
        return [
            Point(
                samples=b,
                seconds=factor * (1e-3 + 1e-4 * b) + more,
                backward=factor * 6e-5 * b,
                optimizer=2e-4,
            )
            for b in (1, 4, 16, 64, 256)
        ]

    placement = Placement(
        launcher="spawn",
        ranks=2,
        threads=1,
        device="cpu",
        backend="gloo",
        strategy="ddp",
        memory_format="channels_last",
    )
    made = Fit(
        time=time.time(),
        seconds=42.0,
        machine=store.machine(),
        cores=2,
        lockstep=version_of("lockstep") or "unknown",
        recipe=Recipe(data="embedded", global_batch=256),
        placement=placement,
        compute=Compute(ranks=2, wrapper=1e-4, alone=points(1.0, 0.0), sharing=points(1.1, 1e-4)),
        together=[],
        gradients=[Gradient(bytes=4 * count, ready=ready) for count, ready in ((40, 1.0), (300, 0.8), (3926, 0.1))],
        software=[software()],
        noise=(),
    )
    return msgspec.structs.replace(made, **changes)


# ---------------------------------------------------------------- the exchange


def test_two_ranks_of_this_host_take_what_was_measured() -> None:
    cluster = Cluster(1, 2, Link(), software())
    for size in (4, 17_064, 1 << 20, 16 << 20):
        assert ring(cluster, size).seconds == pytest.approx(ALPHA + size / BETA, rel=1e-3)
    assert cost_of(cluster, "auto", 17_064) == ring(cluster, 17_064)
    assert cost_of(Cluster(1, 1, Link(), software()), "auto", 17_064).seconds == 0
    assert cost_of(replace(cluster, spare=True), "ring", 1 << 20).busy == 0, "a core is free for it"


@pytest.mark.parametrize(("hosts", "per_host"), [(8, 1), (4, 2), (3, 4)])
def test_hops_add_up_as_the_textbooks_have_them(hosts: int, per_host: int) -> None:
    size, rate, delay, ranks = 10e6, 1e9 / 8, 1e-3, hosts * per_host
    cluster = Cluster(hosts, per_host, parse_link("1gbit,1ms"), software("mpi"))
    hop = ALPHA / 2  # two hops are one all-reduce between two ranks

    def far(part: float) -> float:
        """One delay (1.7 for long parts: TCP spreads them), then the bytes."""
        return hop + (1 + 0.7 * min(1, part / 24e3)) * delay + part / rate

    assert ring(cluster, size).seconds == pytest.approx(2 * (ranks - 1) * far(size / ranks), rel=1e-3)
    near = hop + size / BETA
    up, across = math.ceil(math.log2(per_host)), math.ceil(math.log2(hosts))
    assert tree(cluster, size).seconds == pytest.approx(2 * (up * near + across * far(size)), rel=1e-3)
    expected = 2 * up * near + 2 * (hosts - 1) * far(size / hosts)
    assert hierarchical(cluster, size).seconds == pytest.approx(expected, rel=1e-3)
    assert cost_of(cluster, "auto", size).seconds == pytest.approx(
        min(ring(cluster, size).seconds, tree(cluster, size).seconds)
    )


def test_gloo_asks_before_it_sends() -> None:
    small = Cluster(2, 1, parse_link("1gbit,20ms"), software("gloo"))
    assert ring(small, 40).seconds == pytest.approx(4 * 20e-3 + ALPHA, rel=1e-3), "2 hops of 2 delays"
    # 64 MiB between two hosts: 32 MiB a hop, of which 2 MiB are under way at a time.
    large = Cluster(2, 1, parse_link("400gbit,20ms"), software("gloo"))
    bytes_take = 32 * (1 << 20) / BETA
    assert ring(large, 64 << 20).seconds == pytest.approx(2 * ((16 * 2 + 0.7) * 20e-3 + bytes_take) + ALPHA, rel=1e-2)


def test_delays_of_gloo() -> None:
    """tests/test_predict_delays.py has the same between real ranks."""
    gloo = protocol_of("gloo")
    for ranks in (2, 3, 4, 7, 8, 64):
        assert gloo.around("all_gather", ranks, 1 << 20) == 2 * (ranks - 1)
        for size, number in itertools.product((8, 16, 24, 40, 64, 72, 104, 136, 400, 4000, 1 << 20), (2, 4, 8)):
            counted = gloo.around("all_reduce", ranks, size, number)
            assert counted == gloo_ring(ranks, size, number), (ranks, size, number)
    assert [gloo.down(ranks) for ranks in (1, 2, 3, 4, 6, 8, 1024)] == [0, 2, 2, 3, 3, 4, 11]
    mpi = protocol_of("mpi")
    assert [mpi.around(name, 8, 96) for name in ("all_reduce", "all_gather", "reduce_scatter")] == [14, 7, 7]
    assert [mpi.down(ranks) for ranks in (2, 6, 8)] == [1, 3, 3]


def gloo_ring(ranks: int, size: int, number: int) -> float:
    """Delays of gloo's all-reduce, loop by loop: two segments a rank, two operations under way, empty ones left out; whoever receives asks."""
    count = 2 * ranks
    segment = number * -(-size // (number * count))
    now = np.zeros(ranks)
    for first in (1, 0):
        arrive: list[Any] = []
        leave: list[Any] = []
        for step in range(count):
            if step >= 2:
                now = np.maximum(np.maximum(now, arrive[step - 2]), leave[step - 2])
            if step < count - 2:
                sends, receives = (
                    (2 * (np.arange(ranks) + first + other) + step) % count * segment < size for other in (0, 1)
                )
                asked = now + 1
                arrive.append(np.where(receives, np.maximum(np.roll(now, -1), asked) + 1, -np.inf))
                leave.append(np.where(sends, np.maximum(now, np.roll(asked, 1)), -np.inf))
    return float(now.max())


def test_buckets_are_those_of_torch() -> None:
    import torch
    import torch.distributed as dist

    chance = random.Random(3)
    for bucket_mb, limits in ((25.0, [1 << 20, 25 << 20]), (1.0, [1 << 20]), (0.1, [int(0.1 * (1 << 20))])):
        sizes = [chance.choice((10, 1000, 40_000, 300_000, 3_000_000)) for _ in range(40)]
        tensors = [torch.empty(size, device="meta") for size in sizes]
        theirs, _ = dist._compute_bucket_assignment_by_size(tensors, limits)
        assert buckets([4 * size for size in sizes], bucket_mb) == theirs


def test_messages_of_every_strategy() -> None:
    gradients = [Gradient(bytes=2 << 20, ready=1.0), Gradient(bytes=100, ready=0.5), Gradient(bytes=1 << 20, ready=0.2)]

    def sent(strategy: str, **more: Any) -> list[tuple[float, float]]:
        placement = msgspec.convert({"strategy": strategy, "ranks": 2, **more}, Placement)
        return [(message.bytes, message.ready) for message in messages(placement, gradients)]

    assert sent("ddp") == [(1 << 20, 0.2), ((2 << 20) + 100, 1.0)], "the first bucket is full with 1 MiB"
    assert sent("ddp", ddp={"hook": "bf16"}) == [(1 << 19, 0.2), ((1 << 20) + 50, 1.0)]
    assert sent("flat") == [((3 << 20) + 100, 1.0)]
    assert [ready for _, ready in sent("naive")] == [1.0, 1.0, 1.0]
    assert sent("local-sgd") == sent("flat")


def test_what_is_hidden_behind_backward() -> None:
    from lockstep.predict.exchange import Cost

    one, two = Message(bytes=1, ready=0.25), Message(bytes=2, ready=1.0)

    def cost(seconds: float, busy: float = 0.0) -> Any:
        return lambda message: Cost(seconds * message.bytes, busy * message.bytes)

    assert exposed([one], 8.0, cost(3.0)) == 0, "it ends at 5 of 8"
    assert exposed([one], 8.0, cost(7.0)) == 1
    assert exposed([one, two], 8.0, cost(3.0)) == 6, "the second starts when backward ends"
    assert exposed([one, two], 8.0, cost(8.0)) == 2 + 16, "and waits for the first"
    assert exposed([one], 8.0, cost(3.0, busy=2.0)) == 2, "what needs the processor is never hidden"


# ---------------------------------------------------------------- computing, and waiting


def test_compute_between_and_beyond_what_was_measured() -> None:
    made = [Point(samples=s, seconds=t, backward=t / 2, optimizer=1.0) for s, t in ((1, 10.0), (4, 10.0), (8, 14.0))]
    assert [at(made, samples).seconds for samples in (1, 2, 4, 6, 8, 12)] == [10, 10, 10, 12, 14, 18]
    assert at(made, 6).backward == 6
    parts = Compute(ranks=3, wrapper=0.5, alone=made, sharing=[replace_point(p, 4.5) for p in made]).parts(4, 3, 3, 3)
    assert (parts.compute, parts.wrapper) == (3 * 9 + 1, 3 * 0.5), (
        "the optimizer works once a step, the wrapper in each pass"
    )
    assert parts.contention == 3 * 4.0, "4.5 more with all three, of which 0.5 are the wrapper's"
    half = Compute(ranks=3, wrapper=0.5, alone=made, sharing=[replace_point(p, 4.5) for p in made]).parts(4, 1, 2, 3)
    assert half.contention == 2.0, "two of three ranks: half-way between one and all"
    turns = Compute(ranks=3, wrapper=0.5, alone=made, sharing=[replace_point(p, 4.5) for p in made]).parts(4, 3, 6, 3)
    assert sum(turns[:3]) == 2 * (3 * 13.5 + 1), "six ranks where three have room: all of it twice"
    there = Compute(ranks=3, wrapper=0.5, alone=made, sharing=[replace_point(p, 4.5) for p in made]).parts(4, 3, 6, 8)
    assert sum(there[:3]) == 3 * (9 + 0.5) + 1 + 3 * 4.0 * 5 / 2, "eight have room: contention goes on to grow"
    quicker = Compute(ranks=3, wrapper=0.5, alone=made, sharing=[replace_point(p, -0.5) for p in made]).parts(
        4, 1, 64, 64
    )
    assert quicker.contention == -1.0, "less than nothing, as measured with three: noise, which does not grow"


def test_ranks_take_turns_only_where_there_are_no_cores_for_them() -> None:
    """Two ranks were measured, and four are asked for: on two cores a step takes twice as long, and on eight it does not."""
    narrow, wide = (planted(cores=cores) for cores in (2, 8))
    case = Case(micro=16, per_host=4)
    alone = at(narrow.compute.alone, 16).seconds
    assert bare(narrow, case).seconds > 2 * alone
    assert bare(wide, case).seconds < 1.6 * alone
    assert (narrow.room, wide.room) == (2, 8)
    assert planted(cores=8, placement=msgspec.structs.replace(wide.placement, threads=4)).room == 2


def replace_point(point: Point, more: float) -> Point:
    return msgspec.structs.replace(point, seconds=point.seconds + more)


def test_what_the_closed_form_misses_is_added_where_ranks_exchange() -> None:
    known = bare(planted(), Case(micro=16, per_host=2))
    bare_step, beyond = known.seconds, known.exchange + known.waiting + 3e-3
    sure = Measured(samples=16, seconds=bare_step + 3e-3, beyond=beyond, spread=1e-5)
    fitted = planted(together=[sure])
    assert missed(fitted, 16) == missed(fitted, 99) == pytest.approx(3e-3)
    # A long step that differs by milliseconds from round to round knows little about an exchange.
    unsure = Measured(samples=16, seconds=bare_step + 13e-3, beyond=beyond + 10e-3, spread=1e-3)
    assert missed(planted(together=[sure, unsure]), 16) == pytest.approx(3e-3, abs=2e-6)
    # What grows with the batch for certain does so between the batches that were measured, and not beyond.
    large = bare(planted(), Case(micro=116, per_host=2))
    grows = Measured(samples=116, seconds=1.0, beyond=large.exchange + large.waiting + 8e-3, spread=1e-5)
    found = [missed(planted(together=[sure, grows]), micro) for micro in (16, 66, 116, 500)]
    assert found == pytest.approx([3e-3, 5.5e-3, 8e-3, 8e-3])
    perhaps = msgspec.structs.replace(grows, spread=1e-2)
    assert missed(planted(together=[sure, perhaps]), 116) == pytest.approx(3e-3, abs=1e-5)
    assert predict(fitted, Case(micro=16, per_host=2)).seconds == pytest.approx(bare_step + 3e-3), "it was measured"
    assert predict(fitted, Case(micro=16)) == predict(planted(), Case(micro=16)), "one rank exchanges nothing"
    every = predict(fitted, Case(micro=16, per_host=2, every=4)).seconds
    without = predict(planted(), Case(micro=16, per_host=2, every=4)).seconds
    assert every == pytest.approx(without + 3e-3 / 4), "once in four steps"


def test_a_hop_waits_for_the_others_on_its_core() -> None:
    """What was measured with two ranks on each core, which is one other, with more of them."""
    free, crowded = planted(), planted(crowding_s=1e-3)
    for ranks, others in ((2, 0), (3, 1), (4, 1), (5, 2), (8, 3)):
        case = Case(micro=8, per_host=ranks)
        beyond = predict(crowded, case).seconds - predict(free, case).seconds
        assert beyond == pytest.approx(2 * (ranks - 1) * 1e-3 * others, abs=1e-9)


def test_a_step_adds_up_from_what_was_planted() -> None:
    step = predict(planted(), Case(micro=32, hosts=4, per_host=2, link=parse_link("1gbit,1ms")))
    assert step.compute == pytest.approx(1e-3 + 32e-4)
    assert step.wrapper == 1e-4
    assert step.contention == pytest.approx(0.1 * (1e-3 + 32e-4))
    far = 2e-3
    assert step.exchange == pytest.approx(14 * (ALPHA / 2 + far + 17_064 / 8 * 8 / 1e9), rel=1e-3)
    assert step.seconds == pytest.approx(step.compute + step.wrapper + step.contention + step.exchange)
    local = predict(planted(), Case(micro=32, hosts=4, per_host=2, link=parse_link("1gbit,1ms"), every=8))
    assert (local.wrapper, local.exchange) == (0, pytest.approx(step.exchange / 8))
    noisy = predict(planted(noise=((-0.1, 0.1),)), Case(micro=32, per_host=2))
    assert noisy.waiting == pytest.approx(0.05 * (1.1 * (1e-3 + 32e-4) + 1e-4)), (
        "the larger of two coins: +0.1 in 3 of 4"
    )


# ---------------------------------------------------------------- the replay


@pytest.mark.parametrize("algorithm", ["ring", "tree", "hierarchical"])
@pytest.mark.parametrize(("hosts", "per_host"), [(1, 2), (2, 1), (8, 1), (16, 2), (4, 8)])
def test_without_noise_the_replay_is_the_closed_form(algorithm: str, hosts: int, per_host: int) -> None:
    chance = random.Random(hosts * per_host)
    for _ in range(5):
        sizes = [chance.choice((400, 400_000, 4_000_000)) for _ in range(4)]
        gradients = [Gradient(bytes=size, ready=(place + 1) / 4) for place, size in enumerate(sizes)]
        fitted = planted(gradients=gradients, together=[Measured(samples=16, seconds=0.02, beyond=0.01, spread=1e-3)])
        link = parse_link(chance.choice(("10gbit,50us", "1gbit,1ms", "100mbit,20ms")))
        case = Case(64, 1, hosts, per_host, None, link, algorithm, chance.choice((None, 4)))
        fitted = msgspec.structs.replace(
            fitted, compute=msgspec.structs.replace(fitted.compute, ranks=max(2, per_host))
        )
        expected = predict(fitted, case).seconds
        assert replay(script_of(fitted, case), 8).step == pytest.approx(expected, rel=0.01)


def test_noise_and_a_straggler_in_the_replay() -> None:
    sent = [Message(bytes=17_064, ready=1.0)]
    cluster = Cluster(64, 1, parse_link("10gbit,10us"), software())
    script = Script(4e-3, 6e-3, 0.0, sent, {"all_reduce": cluster})
    exchange = ring(cluster, 17_064).seconds
    assert replay(script, 3, slow=(5, 1.5)).step == pytest.approx(15e-3 + exchange), "all wait for the slow one"
    noise = noise_of(np.random.default_rng(2).exponential(0.05, size=(1, 400)) - 0.05, 400)
    found = replay(script, 300, noise)
    expected = 10e-3 * (1 + slowest(noise, 64)) + exchange
    assert found.step == pytest.approx(expected, rel=0.03), "two ways to the same wait for the slowest"
    assert found.waiting == pytest.approx(10e-3 * slowest(noise, 64), rel=0.1)
    kept = replay(script, 2, noise, keep=True).timeline
    assert len(kept) == 2
    assert [len(kept[0][name]) for name in ("began", "computed", "exchanged")] == [64, 64, 64]
    assert max(kept[0]["computed"]) < min(kept[0]["exchanged"]), "no rank has the sum before the last one has given"


@pytest.mark.parametrize(
    ("hosts", "per_host"), [(2, 1), (1, 2), (3, 1), (7, 1), (2, 2), (5, 3), (3, 5), (16, 2), (1, 6)]
)
def test_around_a_ring_in_one_go_is_hop_by_hop(hosts: int, per_host: int) -> None:
    chance, ranks = np.random.default_rng(hosts * per_host), hosts * per_host
    for near, far in ((1.0, 3.0), (3.0, 1.0), (1.0, 1.0), (0.0, 1.0), (1e-4, 0.1)):
        hop = np.where((np.arange(ranks) % per_host == 0) & (hosts > 1), far, near)
        for hops, apart in itertools.product((ranks - 1, 2 * (ranks - 1)), (0.0, 0.5, 5.0, 500.0)):
            start = apart * chance.exponential(size=ranks)
            now = start.copy()
            for _ in range(hops):
                now = np.maximum(now, np.roll(now, 1)) + hop
            assert around(start, hop, hops) == pytest.approx(now, rel=1e-9, abs=1e-9), (near, far, hops, apart)


def test_ten_thousand_ranks() -> None:
    case = Case(1, 1, 5000, 2, link=parse_link("25gbit,10us"))
    began = time.process_time()
    found = replay(script_of(planted(), case), 3)
    assert found.step == pytest.approx(predict(planted(), case).seconds, rel=0.01)
    noise = noise_of(np.random.default_rng(2).exponential(0.05, size=(2, 2000)) - 0.05, 4000)
    late = replay(script_of(planted(), case), 3, noise)
    assert late.step > found.step
    assert time.process_time() - began < 10


# ---------------------------------------------------------------- rank counts and verdicts


def test_rank_counts_as_people_write_them() -> None:
    assert asked_ranks("2,4,8,…,1024") == [2**k for k in range(1, 11)]
    assert asked_ranks("3, 9, ..., 200") == [3, 9, 27, 81, 200]
    assert asked_ranks("16,2,16") == [2, 16]
    for text in ("2,…,8", "2,4,…", "two", "0", "4,2,…,8", "2,,4"):
        with pytest.raises(InputError, match="--ranks"):
            asked_ranks(text)
    assert usual_ranks(Ask(batch=24)) == [2, 4, 8, 16]
    assert usual_ranks(Ask(batch=24, weak=True))[-1] == 1024


def test_strong_and_weak_scaling() -> None:
    strong = {row.ranks: row for row in table(planted(), Ask(batch=256, per_host=2), [2, 4, 6, 512])}
    one = 1e-3 + 256e-4
    assert strong[1].step
    assert strong[1].step.seconds == pytest.approx(one)
    assert strong[2].step
    two = 1.1 * (1e-3 + 128e-4) + 1e-4 + ALPHA + 17_064 / BETA
    assert strong[2].step.seconds == pytest.approx(two, rel=1e-3)
    assert strong[2].speed_up == pytest.approx(one / two, rel=1e-3)
    assert strong[2].efficiency == pytest.approx(one / two / 2, rel=1e-3)
    assert strong[2].images_per_second == pytest.approx(256 / two, rel=1e-3)
    assert (strong[4].case.hosts, strong[4].case.per_host) == (2, 2)  # type: ignore[union-attr]
    assert strong[6].reason == "global batch 256 does not divide by 6"
    assert strong[512].reason == "global batch 256 does not divide by 512"
    weak = {row.ranks: row for row in table(planted(), Ask(batch=128, weak=True, per_host=2), [2])}
    assert weak[2].global_batch == 256
    assert weak[2].speed_up == pytest.approx(2 * (1e-3 + 128e-4) / two, rel=1e-3)
    micro = table(planted(), Ask(batch=256, per_host=2, micro_batch=32), [2])[1]
    assert micro.case
    assert (micro.case.micro, micro.case.accumulation) == (32, 4)
    shm = msgspec.structs.replace(planted().placement, backend="shm")
    beyond = table(planted(placement=shm), Ask(batch=256, per_host=2), [4])[1]
    assert beyond.reason == "backend=shm stays on one host, which holds 2 ranks"


def test_the_verdict_names_where_it_stops_and_why() -> None:
    slow = Ask(batch=256, per_host=2, link=parse_link("100mbit,20ms"))
    rows = table(planted(), slow, [2, 4, 8, 16])
    found = judge(planted(), slow, rows)
    assert (found.pays_up_to, found.stops_at) == (2, 4)
    assert "the speed-up falls from 1.7 to" in found.text
    assert "exchange that nothing hides" in found.next
    assert "--every 8" in found.next
    quick = Ask(batch=256, per_host=2, link=parse_link("400gbit,0us"))
    free = planted(software=[Software(backend="gloo", ranks=2, points=[(4, 1e-9), (8, 1e-9), (1e9, 1e-9)])])
    found = judge(free, quick, table(free, quick, [2, 4, 8, 16, 32, 64]))
    assert found.stops_at == 32, "a floor of 1 ms is half of what 32 ranks of 8 samples take"
    assert "small batches, which have a floor" in found.next
    weak = judge(free, replace(quick, weak=True), table(free, replace(quick, weak=True), [2, 64]))
    assert weak.stops_at is None
    assert weak.text.startswith("Data parallelism still pays at 64 ranks")
    assert "each other's way" in weak.next


# ---------------------------------------------------------------- what is kept, and what is asked


def test_a_fit_is_kept_by_what_a_step_depends_on(tmp_path: Path) -> None:
    made = planted()
    assert fit.load(made.recipe, made.placement, tmp_path) is None
    fit.save(made, tmp_path)
    assert fit.load(made.recipe, made.placement, tmp_path) == made
    other = msgspec.structs.replace(made.recipe, seed=9, epochs=7, global_batch=64)
    assert fit.load(other, made.placement, tmp_path) == made, "neither changes how long a step takes"
    for change in ({"model": "tied-conv"}, {"precision": "bf16"}):
        assert fit.load(msgspec.structs.replace(made.recipe, **change), made.placement, tmp_path) is None
    assert fit.load(made.recipe, msgspec.structs.replace(made.placement, backend="mpi"), tmp_path) is None
    every = msgspec.structs.replace(made.placement, local_sgd=LocalSgd(every=32))
    assert fit.load(made.recipe, every, tmp_path) == made, "ddp does not read it"
    local = [msgspec.structs.replace(each, strategy="local-sgd") for each in (made.placement, every)]
    assert len({fit.key(made.recipe, each) for each in local}) == 2, "it exchanges less often"
    sgd = [
        Optimizer(name="sgd"),
        Optimizer(name="sgd", momentum=0.9),
        Optimizer(name="sgd", momentum=0.9, nesterov=True),
    ]
    sgd.append(Optimizer(name="sgd", weight_decay=1e-4))
    updates = [msgspec.structs.replace(made.recipe, optimizer=each) for each in sgd]
    assert len({fit.key(each, made.placement) for each in updates}) == 4, "each makes an update more work"
    warmer = [
        msgspec.structs.replace(updates[1], optimizer=Optimizer(name="sgd", momentum=m, lr=1.0)) for m in (0.5, 0.9)
    ]
    assert len({fit.key(each, made.placement) for each in warmer}) == 1, "how much of it does not"
    path = tmp_path / f"{fit.key(made.recipe, made.placement)}.json"
    path.write_text(path.read_text().replace(f'"format": {fit.FORMAT}', '"format": 0'))
    assert fit.load(made.recipe, made.placement, tmp_path) is None


def test_a_users_own_model_is_fitted_anew_when_its_file_changes(tmp_path: Path) -> None:
    net = tmp_path / "nets.py"
    net.write_text("one")
    recipe = Recipe(model=f"{net}:Net")
    before = fit.key(recipe, Placement())
    assert fit.key(recipe, Placement()) == before
    net.write_text("two")
    assert fit.key(recipe, Placement()) != before


def test_where_a_fit_is_made() -> None:
    recipe, asked = Recipe(data="embedded", batch_per_rank=16), partial(Placement, backend="gloo", device="cpu")
    found, placement, _ = here(recipe, asked(ranks=8, hosts=4, launcher="torchrun", threads=1, rendezvous="a:1"))
    assert (placement.ranks, placement.hosts, placement.launcher) == (2, 1, "spawn")
    assert (found.global_batch, found.batch_per_rank) == (128, None)
    emulated = here(recipe, asked(ranks=2, hosts=2, emulated=True, link="1gbit", threads=1))[1]
    assert (emulated.ranks, emulated.hosts, emulated.link) == (2, 1, None), "emulated hosts share this machine"
    if cores() > 1:
        _, placement, remarks = here(recipe, asked(ranks=1, threads=cores()))
        assert (placement.ranks, placement.threads) == (cores(), 1)
        assert "ranks of one thread" in remarks[0]
    with pytest.raises(InputError, match="divide"):
        here(recipe, asked(threads=1, ranks=3, hosts=2))
    synchronised = msgspec.structs.replace(recipe, regularize=Regularize(batch_norm="synchronised"))
    assert here(synchronised, asked(threads=1, ranks=2))[0] == msgspec.structs.replace(
        synchronised, batch_per_rank=None, global_batch=32
    )
    with pytest.raises(InputError, match=r"batch_norm=synchronised with strategy=local-sgd cannot be predicted"):
        here(synchronised, asked(threads=1, ranks=2, strategy="local-sgd"))


def test_batches_to_measure() -> None:
    assert measure.grid(256, 2, 1e9) == (128, [1, 2, 4, 8, 16, 32, 64, 256])
    assert measure.grid(32, 2, 1e9) == (16, [1, 2, 4, 8, 32])
    assert measure.grid(4096, 2, 70.0) == (32, [1, 2, 4, 8, 16, 64]), "larger ones would take too long"
    own, others = measure.grid(1, 2, 1e9)
    assert own == 1
    assert others == [2]


# ---------------------------------------------------------------- the check


def tried(*errors: float) -> list[score.Tried]:
    """Of one recipe each."""
    held = Held("batch", ("ranks=1", "global_batch=8"))
    return [score.Tried(str(number), held, 1.0, 1.0 + error) for number, error in enumerate(errors)]


def test_errors_are_summed_up_with_their_worst() -> None:
    found = score.summary(tried(0.03, -0.04, 0.05))
    assert found["median_error"] == pytest.approx(0.04)
    assert found["worst_error"] == pytest.approx(0.05)
    assert (found["lowest"], found["highest"]) == (pytest.approx(-0.04), pytest.approx(0.05))
    assert found["goal_met"]
    assert not score.summary(tried(0.01, 0.2, 0.01))["goal_met"], "one of three is more than one of ten"


def test_each_prediction_is_judged_by_itself() -> None:
    """Off by +20 % and then by -20 %: that is 20 %, not nothing."""
    assert score.summary(tried(0.2, -0.2))["median_error"] == pytest.approx(0.2)
    kinds = score.by_kind(tried(0.2, -0.2))
    assert kinds["batch"]["mean_signed"] == pytest.approx(0.0)
    assert kinds["batch"]["median_error"] == pytest.approx(0.2)


def test_the_order_of_placements_is_judged_by_time_a_sample_and_within_one_recipe() -> None:
    held = [Held("batch", ("ranks=1", f"global_batch={batch}")) for batch in (8, 16, 32)]
    cases = [
        score.Tried("one", held[0], 1.0, 1.0),
        score.Tried("one", held[1], 1.5, 1.4),  # less time a sample, as predicted
        score.Tried("one", held[2], 5.0, 2.5),  # predicted to take more, takes less: wrong beside both others
        score.Tried("two", held[0], 9.0, 1.0),  # of another recipe: not compared
    ]
    assert score.ranking(cases) == pytest.approx(1 / 3)
    assert score.ranking(cases[:1]) is None


def test_intervals_from_the_other_errors_hold_as_often_as_they_say() -> None:
    rng = random.Random(3)
    held = [Held("batch", ("ranks=1", f"global_batch={batch}")) for batch in range(1, 401)]
    cases = [score.Tried(str(n), each, 1.0, math.exp(rng.gauss(0.02, 0.05))) for n, each in enumerate(held)]
    assert score.coverage(cases, 0.9) == pytest.approx(0.9, abs=0.04)
    assert score.coverage(cases, 0.5) == pytest.approx(0.5, abs=0.06)
    said = score.sentence(found := score.summary(cases))
    assert f"hold in {found['nine_of_ten_held']:.0%}, 50 % intervals in {found['half_held']:.0%} (goal" in said
    assert score.coverage(cases[:2], 0.9) is None, "one error says nothing about another"
    same_fit = [each._replace(group="one") for each in cases]
    assert score.coverage(same_fit, 0.9) is None, "errors of one fit are alike, and say nothing about another fit"


def test_what_emulated_hosts_cost_is_told_apart_by_two_anchors() -> None:
    assert check.detour_of([]) == Detour(0, 0)
    assert check.detour_of([(3, 12, 24e-3)]) == pytest.approx(Detour(0, 2e-3))
    two = [(messages, trips, messages * 3e-3 + trips * 1e-3) for messages, trips in ((5, 10), (5, 30))]
    assert check.detour_of(two) == pytest.approx(Detour(3e-3, 1e-3))
    faster = [(5, 10, 10e-3), (5, 30, 60e-3)]  # a message would give time back
    assert check.detour_of(faster) == pytest.approx(Detour(0, (10 * 10e-3 + 30 * 60e-3) / (10**2 + 30**2)))
    assert check.detour_of([(3, 12, -1e-3)]) == Detour(0, 0)


def test_no_held_out_placement_is_one_that_was_fitted() -> None:
    """A fit measures its own batch and its double with all ranks, and single batches with one."""
    from lockstep.settings import load

    held = [(group, each) for group in GROUPS for each in group.held]
    assert len(held) >= 40
    assert len(set(held)) == len(held)
    for group, each in held:
        recipe, placement = load([], [*COMMON, *group.fit, *each.words])
        fitted, _ = load([], [*COMMON, *group.fit])
        own, others = measure.grid(fitted.global_batch, 2, 1e9)
        share = recipe.global_batch // placement.ranks
        alike = placement.ranks <= 2 and not placement.accumulation and not placement.emulated
        assert not alike or share not in (own, *others), each


# ---------------------------------------------------------------- the command


@pytest.fixture
def ready(cli: Cli) -> Cli:
    """The command line with a cache that holds a planted fit."""
    cli.environment["LOCKSTEP_DATA"] = str(cli.folder / "cache" / "data")
    made = planted()
    where = cli.folder / "cache" / "predict" / store.fingerprint()
    fit.save(made, where)
    return cli


WORDS = ("data=embedded", "global_batch=256", "ranks=2", "threads=1", "backend=gloo", "strategy=ddp")


def without_torch(cli: Cli, *words: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; sys.modules['torch'] = None\nsys.argv = ['lockstep', *sys.argv[1:]]\nfrom lockstep.cli import main\nmain()"
    argv = [sys.executable, "-c", code, "predict", *words]
    return subprocess.run(argv, capture_output=True, text=True, env=cli.environment, cwd=cli.folder, timeout=120)


def test_predictions_from_a_fit_need_no_torch(ready: Cli) -> None:
    result = without_torch(ready, *WORDS, "--ranks", "2,4,…,64", "--link", "25gbit,10us", "--replay", "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert [row["ranks"] for row in found["rows"]] == [1, 2, 4, 8, 16, 32, 64]
    parts = ("compute_ms", "wrapper_ms", "contention_ms", "exchange_ms", "waiting_ms")
    for row in found["rows"]:
        assert row["step_ms"] == pytest.approx(sum(row[part] for part in parts))
        assert row["interval_ms"] is None
    assert found["rows"][1]["step_ms"] == pytest.approx(1.1 * 13.8 + 0.1 + ALPHA * 1e3 + 17_064 / BETA * 1e3, rel=1e-3)
    assert found["earned_text"] == "not checked on this machine: run 'lockstep predict --check'"
    assert any("joined by 25gbit,10us" in text for text in found["assumed"])
    assert [one["ranks"] for one in found["replay"]] == [2, 4, 8, 16, 32, 64]
    assert found["replay"][2]["step_ms"] == pytest.approx(found["rows"][3]["step_ms"], rel=0.01)
    assert found["replay"][2]["straggler_costs"] > 0.1
    table = ready("predict", *WORDS, "--every", "4", "--ranks", "2,6")
    assert table.returncode == 0, table.stderr
    assert "weights averaged every 4 steps" in table.stdout
    assert "global batch 256 does not divide by 6" in table.stdout
    assert "10gbit,50us, which is assumed" in table.stdout


def test_a_fit_or_a_check_of_another_version_says_so(ready: Cli) -> None:
    where = ready.folder / "cache" / "predict" / store.fingerprint()
    said = " ".join(ready("predict", *WORDS, "--ranks", "2").stdout.split())
    assert "another version" not in said
    fit.save(planted(lockstep="0.1"), where)
    score_kept = {
        "n": 0,
        "median_error": 0.0,
        "ninth_decile": 0.0,
        "worst_error": 0.0,
        "nine_of_ten_held": None,
        "kinds": {},
    }
    (where / "check.json").write_text(json.dumps({"format": check.FORMAT, "time": 0.0, "quick": True, **score_kept}))
    said = " ".join(ready("predict", *WORDS, "--ranks", "2").stdout.split())
    own = version_of("lockstep")
    assert f"This fit is from another version of Lockstep (0.1; this is {own}): fit again with --measure." in said
    assert f"The intervals are from another version of Lockstep (unknown; this is {own}): run 'lockstep" in said


def test_a_batch_that_no_two_ranks_can_share_is_refused_before_anything_is_measured(ready: Cli) -> None:
    for words in (("global_batch=1", "ranks=2"), ("global_batch=1",), ("global_batch=256", "ranks=2", "--batch", "1")):
        said = ready.error("predict", "data=embedded", *words, code=2)
        assert "global_batch=1 leaves some of 2 ranks without a sample" in said
    _, placement, _ = here(Recipe(global_batch=1), Placement(threads=1), weak=True)
    assert placement.threads == 1, "a batch of one for each rank can be predicted"


def test_a_fit_on_a_starved_machine_has_earned_no_interval(ready: Cli) -> None:
    fit.save(planted(cores_had=0.31), ready.folder / "cache" / "predict" / store.fingerprint())
    found = ready("predict", *WORDS, "--ranks", "2")
    assert found.returncode == 0, found.stderr
    said = " ".join(found.stdout.split())
    assert "no interval: it was fitted on 31% of its cores" in said
    assert said.endswith("It is not to be trusted: the machine was starved.")
    assert found.stderr.splitlines()[-1].startswith("next: end the other work ('top' shows it)")


def test_every_prediction_comes_with_what_the_model_earned(ready: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    held = [Held("ranks", ("ranks=2", f"global_batch={batch}")) for batch in (8, 16, 24, 32)]
    held += [Held("hosts", ("ranks=4", f"global_batch={batch}")) for batch in (8, 16, 24)]
    cases = [
        score.Tried("one", each, 1.0, 1.0 + error)
        for each, error in zip(held, (0.02, -0.03, 0.08, 0.01, 0.1, -0.1, 0.1), strict=True)
    ]
    kept = {
        "format": check.FORMAT,
        "time": time.time(),
        "quick": True,
        "kinds": score.by_kind(cases),
        **score.summary(cases),
    }
    (ready.folder / "cache" / "predict" / store.fingerprint() / "check.json").write_text(json.dumps(kept))
    result = ready("predict", *WORDS, "--ranks", "2,4,1024", "--batch", "1024", "--json")
    found = json.loads(result.stdout)
    one, two, four, many = found["rows"]
    assert one["interval_ms"] is None, "one rank was never checked"
    assert any("No interval for another batch of one rank" in text for text in found["assumed"])
    wide = [math.log(row["interval_ms"][1] / row["step_ms"]) for row in (two, many)]
    kinds: dict[str, Any] = kept["kinds"]
    everyone = [each.error for each in cases]
    assert kinds["ranks"]["spread"] == pytest.approx(spread([0.02, -0.03, 0.08, 0.01], everyone, 4))
    assert wide[0] == pytest.approx(2.132 * kinds["ranks"]["spread"], rel=1e-3), "Student's t of four placements"
    assert two["likely_ms"][1] < two["interval_ms"][1]
    assert four["kind"] == "link", "two hosts of two ranks"
    assert four["interval_ms"] is None
    assert many["kind"] == "hosts"
    assert wide[1] == pytest.approx(9 * 2.353 * kinds["hosts"]["spread"], rel=1e-3), "eight doublings beyond four ranks"
    assert any("widen with every doubling" in text for text in found["assumed"])
    assert "7 predictions of held-out placements on this machine" in found["earned_text"]


def keep_between(
    cli: Cli, placement: Placement, seconds: Callable[[float], float], collective: str = "all_reduce"
) -> None:
    """As if `lockstep comms` had measured it there."""
    cells = [
        Cell(
            backend="gloo",
            device="cpu",
            ranks=placement.ranks,
            collective=collective,
            bytes=size,
            message_bytes=size,
            n=9,
            median_us=seconds(size) * 1e6,
            time=time.time(),
        )
        for size in (4 * 2**k for k in range(25))
    ]
    between.save(placement, cells, cli.folder / "cache" / "comms")


EMULATED = Placement(hosts=2, ranks=2, emulated=True, link="1gbit,0.5ms", launcher="spawn")


def test_a_measured_link_is_what_was_measured(ready: Cli) -> None:
    """Two hosts of one rank: the exchange takes what comms measured there. Of more hosts a hop is the measured one."""
    keep_between(ready, EMULATED, lambda size: 5e-3 + size / 1e8)
    words = (*WORDS, "--ranks", "2,4", "--per-host", "1", "--json")
    found = json.loads(ready("predict", *words, "--link", "measured").stdout)
    _, two, four = found["rows"]
    # Its hops move bytes as fast as the link, and here more slowly than a processor could.
    assert two["exchange_ms"] == pytest.approx(5 + 17_064 / 1e5, rel=2e-2)
    assert four["exchange_ms"] == pytest.approx(3 * (5 + 17_064 / 2 / 1e5), rel=2e-2), (
        "six hops instead of two, of a quarter"
    )
    assert found["link"] == two["link"] == "measured"
    said = next(text for text in found["assumed"] if "joined by" in text)
    assert "joined by what was measured 20" in said
    assert "with 2 ranks on 2 hosts (emulated hosts, 1gbit,0.5ms)." in said
    replayed = json.loads(ready("predict", *words, "--link", "measured", "--replay").stdout)["replay"]
    assert replayed[0]["step_ms"] == pytest.approx(two["step_ms"], rel=0.01)


def test_several_links_in_one_table(ready: Cli) -> None:
    keep_between(ready, EMULATED, lambda size: 5e-3 + size / 1e8)
    words = (*WORDS, "--ranks", "2,4,6", "--link", "1gbit,1ms", "--link", "10gbit,50us", "--link", "measured")
    found = json.loads(ready("predict", *words, "--json").stdout)
    assert [(row["ranks"], row.get("link")) for row in found["rows"]] == [
        (1, None),
        (2, None),
        (4, "1gbit,1ms"),
        (4, "10gbit,50us"),
        (4, "measured"),
        (6, None),
    ]
    for link, row in zip(("1gbit,1ms", "10gbit,50us", "measured"), found["rows"][2:5], strict=True):
        alone = json.loads(ready("predict", *WORDS, "--ranks", "2,4,6", "--link", link, "--json").stdout)
        assert alone["rows"][2] == row, "what it is alone, it is beside others"
        assert alone["verdict"] == next(one["verdict"] for one in found["links"] if one["link"] == link)
    table = ready("predict", *words)
    assert table.returncode == 0, table.stderr
    assert [line.split()[2] for line in table.stdout.splitlines() if line.strip().startswith("4  ")] == [
        "1gbit,1ms",
        "10gbit,50us",
        "measured",
    ]
    assert "joined by 1gbit,1ms or by 10gbit,50us or by what was measured" in " ".join(table.stdout.split())
    advice = [(one["link"], one["verdict"]["next"]) for one in found["links"]]
    assert len({text for _, text in advice}) > 1
    assert next_of(table) == [f"{link}: {text}" for link, text in advice], "of which link it is"
    one_host = ready("predict", *WORDS, "--ranks", "2", "--link", "1gbit", "--link", "10gbit")
    (same,) = next_of(one_host)
    assert "gbit" not in same, "no link has a part in it"


def next_of(result: subprocess.CompletedProcess[str]) -> list[str]:
    return [line.removeprefix("next: ") for line in result.stderr.splitlines() if line.startswith("next: ")]


def test_what_was_not_measured_between_hosts(ready: Cli) -> None:
    """The error has the command that measures it; hosts that are stated are those to measure."""
    message = ready.error("predict", *WORDS, "--link", "measured", code=2)
    assert message == (
        "--link measured: nothing was measured between hosts with backend=gloo: "
        "'lockstep comms launcher=slurm hosts=2 --backend gloo' measures it"
    )
    keep_between(ready, EMULATED, lambda size: 5e-3, "broadcast")
    message = ready.error("predict", *WORDS, "--link", "measured", code=2)
    assert "all_reduce was not measured 20" in message
    assert (
        "'lockstep comms hosts=emulated:2 ranks=2 link=1gbit,0.5ms --backend gloo --collective all_reduce' measures it"
        in message
    )
    other = msgspec.structs.replace(EMULATED, launcher="slurm", emulated=False, link=None)
    keep_between(ready, other, lambda size: 5e-3)
    assert ready("predict", *WORDS, "--link", "measured", "--ranks", "4").returncode == 0, "the newest that serves"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--ranks", "2,four"), "--ranks 2,four: 'four' is not a number of ranks"),
        (("--link", "1gbit,1%"), "loss is not modelled"),
        (("--link", "fast"), "is neither a rate"),
        (("--per-host", "3"), "--per-host 3: this host was measured with 2 ranks"),
        (("--quick",), "--quick goes with --check"),
        (("--check",), "--check has recipes of its own"),
        (("regularize.batch_norm=synchronised", "strategy=local-sgd"), "with strategy=local-sgd cannot be predicted"),
        (("shares=[3,1]",), "unequal shares cannot be predicted"),
    ],
)
def test_mistakes_are_one_line(ready: Cli, words: tuple[str, ...], message: str) -> None:
    assert message in ready.error("predict", *WORDS, *words, code=2)
