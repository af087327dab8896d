"""What a slow rank, an evaluation, a log that waits and small buckets are said to cost, on records whose answers are known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lockstep.explain import blocks, explain, limits, outside, slowness, straggler
from lockstep.explain.evidence import Evidence
from lockstep.explain.finding import Finding
from lockstep.placement import Ddp, Placement
from lockstep.run import Run, append_line
from test_explain import Folder, folder, rows, way, write_steps, write_ways

__all__ = ["folder"]
STEPS = 200


def timed(run: Run, *ranks: dict[str, Any], exchange: int = 200) -> Run:
    """Ranks that work for so many microseconds in each phase; all leave the exchange together, 0.2 ms after the last one came."""
    noise = np.random.default_rng(1).normal(0, 20, (len(ranks), STEPS))
    work = [sum(phases.values()) + noise[rank] for rank, phases in enumerate(ranks)]
    last = np.max(work, axis=0)
    found = []
    for rank, phases in enumerate(ranks):
        total = last + exchange
        named = {name: value for name, value in phases.items() if name != "other"}
        named["backward"] = named["backward"] + noise[rank]
        found.append(rows(STEPS, **named, exchange=total - work[rank], total=total))
    write_steps(run, *found)
    return run


def told(run: Run, delays: tuple[float, ...] = ()) -> Finding:
    for rank, seconds in enumerate(delays):
        line = {"epoch": 1, "rank": rank, "steps": STEPS, "delayed_seconds": seconds * STEPS}
        append_line(run.rank_folder(rank) / "epochs.jsonl", line)
    return explain(Evidence(run))[0]


BASE = {"data": 100, "forward": 3000, "backward": 6000, "optimizer": 100, "other": 100}


def test_a_slow_rank_costs_all_that_the_others_wait_for(folder: Folder) -> None:
    slower = {**BASE, "forward": 3300, "backward": 6700}
    found = told(timed(folder.run(), BASE, slower))
    assert (found.question, found.cause) == ("straggler", "rank")
    assert found.cost == pytest.approx(1000 / 10500, rel=0.03), "not half of it: both ranks would be done sooner"
    assert found.interval
    assert found.interval[0] < found.cost < found.interval[1]


def test_a_cause_is_named_only_where_it_surely_costs_more_than_two_percent(folder: Folder) -> None:
    """A rank may surely be slow, and hardly anything be lost by that: most of the step is exchange."""
    slower = {**BASE, "forward": 3300, "backward": 6300}
    (found,) = straggler.answer(Evidence(timed(folder.run(), BASE, slower, exchange=60_000)))
    assert found.verdict.startswith("rank 1 is slow")
    assert (found.cause, found.cost) == ("", pytest.approx(600 / 70_000, rel=0.05))
    (found,) = straggler.answer(Evidence(timed(folder.run(), BASE, slower)))
    assert found.cause == "rank"
    assert not limits.Gain(0.06, 0.01, 0.1).worth, "not surely more than what nobody would act on"
    assert limits.Gain(0.06, 0.03, 0.1).worth


@pytest.mark.parametrize(("phase", "cause"), [("other", "besides"), ("data", "loader"), ("optimizer", "besides")])
def test_what_one_rank_alone_does_longer_is_named_by_where_it_is(folder: Folder, phase: str, cause: str) -> None:
    found = told(timed(folder.run(), {**BASE, phase: 1100}, BASE))
    assert (found.question, found.cause) == ("straggler", cause)
    assert "rank 0" in found.verdict
    assert found.cost == pytest.approx(1000 / 10500, rel=0.03)


def test_a_rank_that_had_no_processor_has_a_neighbour(folder: Folder) -> None:
    slower = {**BASE, "forward": 3300, "backward": 6700}
    assert told(timed(folder.run(), BASE, slower), (0.0001, 0.0009)).cause == "neighbour"
    assert told(timed(folder.run(), BASE, slower), (0.0001, 0.0002)).cause == "rank"


def test_noise_alone_costs_nothing_that_a_slow_rank_is_blamed_for(folder: Folder) -> None:
    work = np.random.default_rng(2).normal(10.0, 1.0, (2, 400))
    late = work.copy()
    late[1] += 1.0
    saved = slowness.cost(late, [1])
    assert saved.value == pytest.approx(float((late.max(axis=0) - work.max(axis=0)).mean()), abs=0.2)
    found = straggler.answer(Evidence(timed(folder.run(), BASE, BASE)))
    assert [(each.cause, each.cost) for each in found] == [("", 0.0)]


def test_evaluations_between_steps_are_named_from_a_twentieth_of_the_run_on(folder: Folder) -> None:
    def run(seconds: float) -> Run:
        made = folder.run(train_seconds=9.0, eval_seconds=seconds, logging_seconds=0.01)
        for epoch in range(1, 10):
            append_line(
                made.folder / "epochs.jsonl", {"epoch": epoch, "train_seconds": 1.0, "eval_seconds": seconds / 9}
            )
        return timed(made, BASE, BASE)

    (found,) = outside.answer(Evidence(run(1.0)))
    assert found.cause == "evaluation"
    assert found.cost == pytest.approx(0.1, rel=0.01)
    assert not list(outside.answer(Evidence(run(0.3))))


def test_what_all_ranks_do_beside_the_phases_is_named(folder: Folder) -> None:
    (found,) = outside.answer(Evidence(timed(folder.run(), {**BASE, "other": 1100}, {**BASE, "other": 1100})))
    assert found.cause == "besides"
    assert found.cost == pytest.approx(1100 / 10500, rel=0.02)


def test_small_buckets_come_before_the_exchange_that_they_make_longer(folder: Folder) -> None:
    placement = Placement(
        ranks=2, threads=1, launcher="spawn", device="cpu", backend="gloo", strategy="ddp", ddp=Ddp(bucket_mb=0.01)
    )
    run = folder.run(placement=placement)
    write_ways(run, way("together", 10, 2), way("no-data", 10, 2), way("large-buckets", 9, 2))
    (found,) = limits.answer(Evidence(run))
    assert (found.cause, found.inflates) == ("buckets", True)
    assert found.cost == pytest.approx(0.1)


def test_one_block_of_steps_settles_nothing() -> None:
    assert blocks.mean(np.array([1.0])).ends is None
    low, high = blocks.mean(np.array([1.0, 1.1] * 50)).ends or (0.0, 0.0)
    assert low < 1.05 < high
