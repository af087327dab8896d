"""Parts of a loss with their intervals: parts of a known size in noisy rounds, and what may be said of them. And costs: only measured ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from lockstep.cli.explain import QUESTIONS
from lockstep.explain import ANALYZERS, explain, limits, precision, speedup
from lockstep.explain.evidence import Evidence
from lockstep.explain.finding import Finding
from lockstep.placement import Placement
from lockstep.ways import Way
from test_explain import RECIPE, Folder, rows, way, write_steps, write_ways

PARTS = {"ideal": 10.0, "batch": 1.0, "wrapper": 0.5, "contention": 2.0, "exchange": 1.5, "waiting": 0.6, "rest": 0.4}
CROWD = Placement(ranks=2, threads=4, launcher="spawn", device="cpu", backend="gloo", strategy="ddp")


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def measured(rng: np.random.Generator, n: int, noise: float = 0.02, **parts: float) -> list[Way]:
    """Contenders of two ranks whose parts are these milliseconds. A round is slower or faster as a whole, and each contender jumps by
    `noise` of its time, with the heavy tails of a shared machine."""
    size = {**PARTS, **parts}
    order = ("ideal", "batch", "wrapper", "contention")
    plain, wrapped, apart = (sum(size[name] for name in order[:count]) for count in (2, 3, 4))
    times = {
        "whole": 2 * size["ideal"],
        "plain": plain,
        "wrapped": wrapped,
        "apart": apart,
        "together": sum(size.values()),
    }
    speed = 1 + 0.05 * rng.standard_normal(n)

    def jumps() -> Any:
        return speed * (1 + noise * rng.standard_t(3, n) / 3**0.5)

    found = []
    for name, milliseconds in times.items():
        ranks = 2 if name in ("apart", "together") else 1
        rounds = [[float(seconds)] * ranks for seconds in milliseconds / 1e3 * jumps()]
        within = {part: (size[part] / 1e3 * jumps()).tolist() for part in ("exchange", "waiting") if name == "together"}
        found.append(msgspec.structs.replace(way(name, 1.0, ranks), rounds=rounds, **within))
    return found


def named(ways: list[Way]) -> dict[str, Way]:
    return {each.name: each for each in ways}


def explained(folder: Folder, ways: list[Way], placement: Placement | None = None) -> Finding:
    run = folder.run(placement=placement)
    write_steps(run, *[rows(10, total=16000)] * 2)
    write_ways(run, *ways)
    (found,) = speedup.answer(Evidence(run))
    return found


@pytest.mark.parametrize("n", [4, 8, 20])
def test_the_interval_of_a_part_holds_what_was_planted(n: int) -> None:
    rng, trials = np.random.default_rng(n), 300
    held = dict.fromkeys(PARTS, 0)
    for _ in range(trials):
        ends = speedup.intervals(named(measured(rng, n)))
        for name, milliseconds in PARTS.items():
            between = ends[name]
            assert between is not None
            held[name] += between[0] <= milliseconds / 1e3 <= between[1]
    # Three standard errors of what 300 trials can tell. The rest has wider ends, which hold more.
    assert min(held.values()) >= trials * (0.95 - 3 * (0.95 * 0.05 / trials) ** 0.5), held


def test_a_wrong_cause_is_rarely_named_alone() -> None:
    """Batch 2.0 ms, contention 2.2 ms, exchange 1.8 ms: what 8 rounds cannot tell apart is named together, and the largest is among it."""
    rng, trials, wrong, alone = np.random.default_rng(1), 300, 0, 0
    for _ in range(trials):
        ways = named(measured(rng, 8, batch=2.0, contention=2.2, exchange=1.8))
        found = speedup.largest(speedup.rounds(ways), [*speedup.CAUSES], 0.02 * ways["together"].seconds)
        wrong += bool(found) and "contention" not in found
        alone += len(found) == 1
    assert wrong <= 0.05 * trials, wrong
    assert alone <= 0.5 * trials, "this near to each other"


def test_parts_show_their_intervals_in_verdict_why_and_figures(folder: Folder) -> None:
    found = explained(folder, measured(np.random.default_rng(2), 12, noise=0.005))
    assert found.figures["largest"] == ["contention"]
    low, high = found.figures["intervals_s"]["contention"]
    assert low < 2e-3 < high
    shown = f"({1e3 * low:.2f} ms to {1e3 * high:.2f} ms)"
    assert (
        f"the largest loss is contention {1e3 * found.figures['parts_s']['contention']:.2f} ms {shown}" in found.verdict
    )
    assert shown in found.why
    for name, seconds in found.figures["parts_s"].items():
        low, high = found.figures["intervals_s"][name]
        assert low <= seconds <= high, name


def test_an_interval_is_not_made_up_where_rounds_were_not_kept(folder: Folder) -> None:
    """Records of an earlier version have exchange and waiting as means over all rounds."""
    ways = [msgspec.structs.replace(each, exchange=[], waiting=[]) for each in measured(np.random.default_rng(3), 8)]
    found = explained(folder, ways)
    assert found.figures["intervals_s"]["exchange"] is None
    assert found.figures["intervals_s"]["batch"] is not None


def test_causes_alike_are_named_with_or(folder: Folder) -> None:
    found = explained(folder, measured(np.random.default_rng(4), 8, noise=0.02, batch=0.0, exchange=2.0))
    assert sorted(found.figures["largest"]) == ["contention", "exchange"]
    assert " or " in found.verdict
    assert "which 8 rounds cannot tell apart" in found.verdict
    assert found.next.startswith("measure longer")


def test_nothing_stands_out_where_every_cause_is_within_two_per_cent(folder: Folder) -> None:
    """1.5 % each is surely there, and nothing that anybody would act on; together they cost 6 %."""
    small = dict.fromkeys(("batch", "wrapper", "contention", "exchange"), 0.15) | {"waiting": 0.0, "rest": 0.0}
    found = explained(folder, measured(np.random.default_rng(5), 12, noise=0.001, **small))
    assert found.figures["largest"] == []
    assert found.verdict.endswith("a step are lost)")
    assert "nothing stands out" in found.verdict
    assert found.cost == 0
    assert found.figures["intervals_s"]["batch"][0] > 0, "it can be told from zero"
    none = explained(folder, measured(np.random.default_rng(6), 12, noise=0.001, **dict.fromkeys(small, 0.0)))
    assert none.verdict.endswith("nothing is lost")


def test_a_larger_loss_that_another_analyzer_explains_is_said(folder: Folder) -> None:
    found = explained(folder, measured(np.random.default_rng(7), 12, noise=0.005, waiting=6.0))
    assert "besides waiting (see straggler) the largest loss is contention" in found.verdict
    nothing = dict.fromkeys(("batch", "wrapper", "contention", "exchange", "rest"), 0.0)
    alone = explained(folder, measured(np.random.default_rng(8), 12, noise=0.002, waiting=6.0, **nothing))
    assert "the largest loss is waiting" in alone.verdict
    assert "see straggler" in alone.verdict
    assert alone.cost == 0, "it is counted there"


def test_what_a_run_timed_itself_has_an_interval_too(folder: Folder) -> None:
    rng = np.random.default_rng(9)
    held, trials = 0, 40
    for _ in range(trials):
        run = folder.run()
        late = np.abs(rng.normal(0, 200, 400))  # microseconds that rank 0 waits for rank 1
        exchange = 1000 + rng.normal(0, 100, 400)
        write_steps(
            run,
            rows(400, backward=2000, exchange=exchange + late, total=4000),
            rows(400, backward=2000 + late, exchange=exchange, total=4000),
        )
        (found,) = speedup.answer(Evidence(run))
        low, high = found.figures["intervals_s"]["exchange"]
        assert low < found.figures["parts_s"]["exchange"] < high
        held += low <= 1e-3 <= high
        low, high = found.figures["intervals_s"]["waiting"]
        assert low < found.figures["parts_s"]["waiting"] < high
    assert held >= 0.85 * trials, held
    assert found.why.startswith("exchange 996 µs (988 µs to 1.00 ms), waiting ")


def limited(folder: Folder, *ways: Way, placement: Placement | None = None) -> list[Finding]:
    run = folder.run(placement=placement)
    write_steps(run, *[rows(10, total=16000)] * 2)
    write_ways(run, way("together", 10, 2), way("no-data", 9.9, 2), *ways)
    return list(limits.answer(Evidence(run)))


def test_what_limits_nothing_is_said_with_intervals(folder: Folder) -> None:
    (found,) = limited(folder, way("double", 19.8, 2, 64))
    assert found.figures["cause"] is None
    assert "no loader 1.0% (1.0% to 1.0%)" in found.why
    assert found.figures["intervals"]["double"] == pytest.approx([0.01, 0.01])


def test_threads_cost_what_fewer_of_them_were_seen_to_save(folder: Folder) -> None:
    """Too many threads come first, since they make all else long; their cost is their own, and none where it was not measured."""
    threads, batch = limited(folder, way("fewer-threads", 9, 2), way("double", 12, 2, 64), placement=CROWD)
    assert (threads.figures["cause"], batch.figures["cause"]) == ("threads", "batch")
    assert threads.cost == pytest.approx(0.1)
    assert batch.cost == pytest.approx(0.4)
    assert threads.inflates
    noisy = msgspec.structs.replace(
        way("fewer-threads", 9, 2), rounds=[[s, s] for s in (6e-3, 13e-3, 8e-3, 12e-3, 9e-3)]
    )
    (unsure,) = limited(folder, noisy, placement=CROWD)
    assert unsure.cost == 0
    assert "not settled" in unsure.verdict
    (harmless,) = limited(folder, way("fewer-threads", 10.4, 2), placement=CROWD)
    assert harmless.figures["cause"] is None, "half of them were measured, and save nothing"
    ranks = Placement(ranks=4, threads=1, launcher="spawn", device="cpu", backend="gloo", strategy="ddp")
    run = folder.run(placement=ranks)
    write_steps(run, *[rows(10, total=16000)] * 4)
    write_ways(run, way("together", 10, 4), way("no-data", 9.9, 4))
    (found,) = limits.answer(Evidence(run))
    assert (found.next, found.cost) == ("ranks=2", 0), (
        "one thread cannot be too many, and fewer ranks were not measured"
    )


def test_threads_that_take_turns_come_before_what_they_inflate(folder: Folder) -> None:
    run = folder.run(placement=CROWD)
    write_steps(run, *[rows(50, backward=1000, exchange=1000, total=2000)] * 2)
    write_ways(run, way("together", 10, 2), way("no-data", 5, 2), way("fewer-threads", 9, 2))
    first, second = [each for each in explain(Evidence(run)) if each.cost][:2]
    assert first.figures["cause"] == "threads"
    assert second.cost > first.cost


def test_a_format_that_costs_accuracy_saves_nothing(folder: Folder) -> None:
    runs = [
        folder.run(
            msgspec.structs.replace(RECIPE, seed=seed, precision=name),
            test_accuracy=right - seed / 1000,
            train_seconds=seconds * (1 + seed / 100),
        )
        for seed in range(8)
        for name, seconds, right in (("fp32", 10.0, 0.9), ("bf16", 7.0, 0.8))
    ]
    (found,) = precision.answer(Evidence(runs[0], runs))
    assert "its accuracy is worse" in found.verdict
    assert found.cost == 0


def test_every_question_can_be_asked() -> None:
    assert list(QUESTIONS) == [analyzer.name for analyzer in ANALYZERS]
