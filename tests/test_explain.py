"""The analyzers' arithmetic, on records written by hand whose answers are known."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from lockstep import probe
from lockstep.cli.explain import command
from lockstep.errors import InputError
from lockstep.explain import (
    accuracy,
    explain,
    limits,
    overfitting,
    precision,
    recommend,
    speedup,
    step,
    straggler,
)
from lockstep.explain.evidence import Evidence
from lockstep.measure.phases import NAMES
from lockstep.measure.records import ROW
from lockstep.placement import Placement
from lockstep.plan import plan
from lockstep.recipe import Recipe
from lockstep.run import Options, Probe, Run, Spec, append_line, write_atomic
from lockstep.ways import BESIDE, FILE, Way

RECIPE = Recipe(data="embedded", global_batch=64, epochs=1)


def spec_of(recipe: Recipe, placement: Placement, identity: str) -> Spec:
    planned = plan(recipe, placement, 1000, 500)
    return Spec(
        id=identity, created=0.0, lockstep="0", recipe=recipe, placement=placement, plan=planned, options=Options()
    )


class Folder:
    """Writes run folders as a run leaves them."""

    def __init__(self, root: Path) -> None:
        self.root, self.count = root, 0

    def run(self, recipe: Recipe = RECIPE, placement: Placement | None = None, **summary: Any) -> Run:
        placement = placement or Placement(
            ranks=2, threads=1, launcher="spawn", device="cpu", backend="gloo", strategy="ddp"
        )
        self.count += 1
        run = Run(self.root / f"run-{self.count}")
        for rank in range(placement.ranks):
            run.rank_folder(rank).mkdir(parents=True)
        write_atomic(run.folder / "run.json", msgspec.to_builtins(spec_of(recipe, placement, run.folder.name)))
        write_atomic(run.folder / "environment.json", {"cores_machine": 2})
        write_atomic(run.folder / "summary.json", {"ranks_agree": True, **summary})
        run.write_status("done")
        return run


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def rows(count: int, **phases: Any) -> np.ndarray[Any, Any]:
    """Steps with these phases in microseconds; what no phase has is "other"."""
    found = np.zeros(count, dtype=ROW)
    found["step"] = np.arange(1, count + 1)
    for name, value in phases.items():
        found[f"{name}_ns"] = np.asarray(value) * 1000
    return found


def write_steps(run: Run, *ranks: np.ndarray[Any, Any]) -> None:
    for rank, steps in enumerate(ranks):
        steps.tofile(run.rank_folder(rank) / "steps.bin")


def way(name: str, milliseconds: float, ranks: int = 1, samples: int = 32, **phases: float) -> Way:
    seconds = milliseconds / 1e3
    parts = {**dict.fromkeys((*NAMES, "total"), 0.0), **{key: value / 1e3 for key, value in phases.items()}}
    jitter = [0.99, 1.0, 1.01, 1.0, 1.0]
    return Way(
        name=name,
        samples=samples,
        ranks=ranks,
        threads=1,
        steps=10,
        rounds=[[seconds * j] * ranks for j in jitter],
        phases=[parts] * ranks,
    )


def write_ways(run: Run, *ways: Way) -> None:
    beside = Run(run.folder / BESIDE)
    beside.folder.mkdir(parents=True)
    write_atomic(beside.folder / FILE, {"ways": msgspec.to_builtins(list(ways))})
    beside.write_status("done")


def test_waiting_is_told_apart_from_exchange_and_the_parts_add_up(folder: Folder) -> None:
    run = folder.run()
    # Rank 1 computes 300 µs longer, so rank 0 spends 300 µs more in the exchange: 100 µs of it are the exchange.
    first = rows(50, data=100, forward=500, backward=1000, exchange=400, optimizer=200, total=2250)
    second = rows(50, data=100, forward=600, backward=1200, exchange=100, optimizer=200, total=2250)
    write_steps(run, first, second)
    (found,) = step.answer(Evidence(run))
    by_rank = found.figures["ranks"]
    assert [part["waiting"] * 1e6 for part in by_rank] == pytest.approx([300, 0])
    assert [part["exchange"] * 1e6 for part in by_rank] == pytest.approx([100, 100])
    for part in by_rank:
        assert sum(part[name] for name in NAMES) == pytest.approx(part["total"])
    assert found.verdict == "most of a step is backward: 1.10 ms of 2.25 ms"


def test_a_slow_rank_is_named_with_what_it_costs(folder: Folder) -> None:
    run = folder.run()
    noise = np.random.default_rng(1).normal(0, 20, (2, 400))
    write_steps(
        run,
        rows(400, backward=1000 + noise[0], exchange=1100 - noise[0], total=2100),
        rows(400, backward=2000 + noise[1], exchange=100 - noise[1], total=2100),
    )
    (found,) = straggler.answer(Evidence(run))
    assert found.verdict.startswith("rank 1 is slow: the others wait 1.00 ms a step")
    assert found.figures["ratio"] == pytest.approx(2.0, rel=0.02)
    assert found.cost == pytest.approx(1000 / 2100, rel=0.05), "without it, a step of 2.1 ms would take 1.1"


def test_of_unequal_shares_it_is_said_that_they_do_not_fit(folder: Folder) -> None:
    """A rank with three quarters of the samples works longer: it is not slow."""
    placement = Placement(
        ranks=2, threads=1, launcher="spawn", device="cpu", backend="gloo", strategy="ddp", shares=[3, 1]
    )
    run = folder.run(placement=placement)
    noise = np.random.default_rng(1).normal(0, 20, (2, 400))
    steps = [
        rows(400, backward=3000 + noise[0], exchange=100 - noise[0], total=3100),
        rows(400, backward=1000 + noise[1], exchange=2100 - noise[1], total=3100),
    ]
    for each, samples in zip(steps, (24, 8), strict=True):
        each["samples"] = samples
    write_steps(run, *steps)
    (found,) = straggler.answer(Evidence(run))
    assert found.verdict == "the shares do not fit the ranks: rank 0 is last, and the others wait 2.00 ms a step"
    assert "75%" in found.why.replace(" ", "").replace("75.0", "75")
    assert found.next.startswith("shares=auto")


def test_a_slow_host_is_told_from_a_slow_rank(folder: Folder) -> None:
    placement = Placement(
        ranks=4, hosts=2, threads=1, launcher="torchrun", device="cpu", backend="gloo", strategy="ddp"
    )
    run = folder.run(placement=placement)
    rng = np.random.default_rng(4)

    def steps(*work: float) -> list[np.ndarray[Any, Any]]:
        """Ranks with this much work, each step a tenth more or less; they leave the exchange together."""
        took = np.array(work)[:, None] * (1 + rng.normal(0, 0.1, (len(work), 300)))
        total = took.max(axis=0) + 100
        return [rows(300, backward=mine, exchange=total - mine, total=total) for mine in took]

    write_steps(run, *steps(1000, 1000, 1500, 1500))
    (found,) = straggler.answer(Evidence(run))
    assert found.verdict.startswith("host 1 (all of its ranks) is slow")
    assert found.figures["ratio"] == pytest.approx(1.5, rel=0.02)
    assert found.cost > 0.15
    for work, where in (
        ((1000, 1000, 1000, 1500), "rank 3 on host 1 is"),
        ((1000, 1500, 1500, 1000), "ranks 1 and 2 are"),
    ):
        other = folder.run(placement=placement)
        write_steps(other, *steps(*work))
        assert next(straggler.answer(Evidence(other))).verdict.startswith(f"{where} slow")
    for _ in range(20):
        even = folder.run(placement=placement)
        write_steps(even, *steps(1000, 1000, 1000, 1000))
        assert "no rank is slow" in next(straggler.answer(Evidence(even))).verdict


def test_a_rank_that_was_slow_for_a_while_is_found_with_its_steps(folder: Folder) -> None:
    run = folder.run()
    work = np.full(1000, 1000.0)
    work[400:480] = 2500
    write_steps(
        run,
        rows(1000, backward=1000, exchange=work - 900, total=work + 100),
        rows(1000, backward=work, exchange=100, total=work + 100),
    )
    (found,) = straggler.answer(Evidence(run))
    assert found.verdict == "rank 1 was slow for a while: steps 401 to 480"


def test_even_ranks_are_not_called_slow(folder: Folder) -> None:
    run = folder.run()
    noise = np.random.default_rng(2).normal(0, 100, (2, 500))
    write_steps(run, *(rows(500, backward=1000 + n, exchange=300 - n, total=1300) for n in noise))
    (found,) = straggler.answer(Evidence(run))
    assert "no rank is slow" in found.verdict


CHAIN = {"whole": 20.0, "plain": 11.0, "wrapped": 11.5, "apart": 13.5, "together": 16.0}


def chain(**changed: float) -> list[Way]:
    """Two ranks: ideal 10 ms, batch 1, wrapper 0.5, contention 2, exchange 1.5, waiting 0.6, rest 0.4."""
    times = {**CHAIN, **changed}
    ways = [
        way(name, value, ranks=2 if name in ("apart", "together") else 1)
        for name, value in times.items()
        if name != "together"
    ]
    ways.append(way("together", times["together"], ranks=2, exchange=1.5, waiting=0.6))
    ways.append(way("no-data", times["together"] - 0.1, ranks=2))
    ways.append(way("double", 2 * times["together"] - 0.2, ranks=2, samples=64))
    return ways


def test_the_loss_of_speed_up_is_split_and_adds_up(folder: Folder) -> None:
    run = folder.run()
    write_steps(run, *[rows(10, total=16000)] * 2)
    write_ways(run, *chain())
    (found,) = speedup.answer(Evidence(run))
    parts = {name: seconds * 1e3 for name, seconds in found.figures["parts_s"].items()}
    assert parts == pytest.approx(
        {"ideal": 10, "batch": 1, "wrapper": 0.5, "contention": 2, "exchange": 1.5, "waiting": 0.6, "rest": 0.4}
    )
    assert sum(parts.values()) == pytest.approx(16)
    assert found.figures["speed_up"] == pytest.approx(1.25)
    assert found.figures["beyond_apart_s"] == pytest.approx(2.5e-3), "of which 2.1 ms were timed within the step"
    assert found.figures["largest"] == ["contention"]
    assert "the largest loss is contention 2.00 ms (1.9" in found.verdict
    assert found.cost == pytest.approx(2 / 16)


def test_causes_that_cannot_be_told_apart_are_named_together(folder: Folder) -> None:
    """Batch and contention both cost about 2 ms, and differ by 1 ms from round to round; the exchange costs 0.2 ms."""
    rng = np.random.default_rng(5)
    n = 8
    noise = {name: rng.normal(0, 0.5, n) for name in ("plain", "apart")}
    times = {
        "whole": np.full(n, 20.0),
        "plain": 12.0 + noise["plain"],
        "apart": 14.0 + noise["plain"] + noise["apart"],
        "together": 14.3 + noise["plain"] + noise["apart"],
    }
    ways = []
    for name, values in times.items():
        ranks = 2 if name in ("apart", "together") else 1
        made = way(name, 1.0, ranks, exchange=0.2)
        rounds = [[float(value) / 1e3] * ranks for value in values]
        ways.append(msgspec.structs.replace(made, rounds=rounds, exchange=[0.2e-3] * n, waiting=[0.0] * n))
    run = folder.run()
    write_steps(run, *[rows(10, total=14300)] * 2)
    write_ways(run, *ways)
    (found,) = speedup.answer(Evidence(run))
    assert sorted(found.figures["largest"]) == ["batch", "contention"]
    assert "which 8 rounds cannot tell apart" in found.verdict
    low, high = found.figures["intervals_s"]["contention"]
    assert low < 2e-3 < high
    assert high - low > 0.3e-3
    nothing = folder.run()
    write_steps(nothing, *[rows(10, total=14300)] * 2)
    shaken = [
        msgspec.structs.replace(
            each, rounds=[[t + 4e-3 * float(e) for t in r] for r, e in zip(each.rounds, jolt, strict=True)]
        )
        for each, jolt in zip(ways, rng.normal(0, 1, (4, n)), strict=True)
    ]
    write_ways(nothing, *(msgspec.structs.replace(each, exchange=[0.0] * n) for each in shaken))
    assert next(speedup.answer(Evidence(nothing))).figures["largest"] == [], "noise has no cause"


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ({"plain": 18.0, "wrapped": 18.2, "apart": 18.4, "together": 21.0}, "batch"),
        ({"wrapped": 19.0, "apart": 19.2, "together": 22.0}, "wrapper"),
    ],
)
def test_the_largest_cause_is_named(folder: Folder, changed: dict[str, float], cause: str) -> None:
    run = folder.run()
    write_steps(run, *[rows(10, total=16000)] * 2)
    write_ways(run, *chain(**changed))
    assert f"the largest loss is {cause}" in next(speedup.answer(Evidence(run))).verdict


def test_without_a_probe_what_is_not_known_is_said(folder: Folder) -> None:
    run = folder.run()
    write_steps(run, *[rows(10, backward=1000, exchange=1000, total=2000)] * 2)
    (found,) = speedup.answer(Evidence(run))
    assert "50% of a step is exposed exchange" in found.verdict
    assert found.next.endswith("--measure")


def test_the_loader_the_batch_and_the_threads_are_judged_by_what_is_saved_without_them(folder: Folder) -> None:
    def first(*ways: Way, placement: Placement | None = None) -> list[Any]:
        run = folder.run(placement=placement)
        write_steps(run, *[rows(10, total=16000)] * 2)
        write_ways(run, *ways)
        return list(limits.answer(Evidence(run)))

    base = way("together", 10, ranks=2)
    none = [way("no-data", 9.9, 2), way("double", 19.8, 2, 64), way("fewer-threads", 10.0, 2)]
    assert "neither the loader" in first(base, *none)[0].verdict
    (found,) = first(base, way("no-data", 4, 2), *none[1:])
    assert found.figures["cause"] == "loader"
    assert found.cost == pytest.approx(0.6, abs=0.01)
    (found,) = first(base, none[0], way("double", 11, 2, 64), none[2])
    assert found.figures["cause"] == "batch"
    assert found.cost == pytest.approx(0.45, abs=0.01)
    crowd = Placement(ranks=2, threads=4, launcher="spawn", device="cpu", backend="gloo", strategy="ddp")
    (found,) = first(base, *none[:2], way("fewer-threads", 6, 2), placement=crowd)
    assert found.figures["cause"] == "threads"
    assert found.next == "threads=1"


def curve(run: Run, test: list[float], train: list[float]) -> None:
    for number, (a, b) in enumerate(zip(test, train, strict=True), start=1):
        append_line(
            run.folder / "epochs.jsonl",
            {
                "epoch": number,
                "samples": 1000,
                "test_samples": 500,
                "test_loss": a,
                "train_loss": b,
                "train_accuracy": 0.99,
                "test_accuracy": 0.9,
                "train_seconds": 1.0,
            },
        )


def test_overfitting_is_found_with_its_epoch_and_not_where_there_is_only_noise(folder: Folder) -> None:
    rng = np.random.default_rng(3)
    epochs = np.arange(30)
    falling = np.exp(-epochs / 6)
    rising = folder.run()
    curve(rising, list(0.3 + falling + 0.02 * np.maximum(0, epochs - 14) + rng.normal(0, 0.01, 30)), list(falling))
    (found,) = overfitting.answer(Evidence(rising))
    assert found.verdict.startswith("overfitting since epoch ")
    assert abs(found.figures["best_epoch"] - 15) <= 2
    assert "regularize.dropout=0.25" in found.next
    assert found.figures["gap"] == pytest.approx(0.09)
    wrong = 0
    for _ in range(100):
        flat = folder.run()
        curve(flat, list(0.3 + falling + rng.normal(0, 0.01, 30)), list(falling))
        wrong += next(overfitting.answer(Evidence(flat))).verdict.startswith("overfitting")
    assert wrong <= 2
    short = folder.run()
    curve(short, [1.0, 0.5], [1.0, 0.5])
    assert next(overfitting.answer(Evidence(short))).verdict == "too few epochs to say whether it overfits"


def test_what_was_not_measured_has_no_cost(folder: Folder) -> None:
    crowd = Placement(ranks=2, threads=4, launcher="spawn", device="cpu", backend="gloo", strategy="ddp")
    run = folder.run(placement=crowd)
    write_steps(run, *[rows(10, backward=1000, exchange=10, total=1010)] * 2)
    (found,) = limits.answer(Evidence(run))
    assert "has not been measured" in found.why
    assert found.cost == 0


def test_a_run_that_is_under_way_is_not_disturbed_by_a_probe(folder: Folder) -> None:
    run = folder.run()
    run.write_status("running", supervisor_pid=os.getpid(), host=os.uname().nodename)
    assert command.callback is not None
    with pytest.raises(InputError, match="is running: only a run that has ended well"):
        command.callback("run-1", True, (), None, 12.0, folder.root, True)
    assert not (run.folder / BESIDE).parent.exists(), "nothing was started"


def test_the_checklist_finds_what_changed_with_the_ranks(folder: Folder) -> None:
    def changed(recipe: Recipe, **keys: Any) -> set[str]:
        placement = Placement(
            ranks=2, threads=1, launcher="spawn", device="cpu", backend="gloo", strategy="ddp", **keys
        )
        run = folder.run(recipe, placement, test_accuracy=0.9)
        curve(run, [0.5], [0.5])
        (found,) = accuracy.answer(Evidence(run))
        return {check["name"] for check in found.figures["checks"] if check["changed"]}

    replace = msgspec.structs.replace
    assert changed(RECIPE) == set()
    assert changed(replace(RECIPE, batch_per_rank=32)) == {"global batch", "learning rate"}
    assert changed(replace(RECIPE, batch_per_rank=32, lr_rule="linear")) == {"global batch"}
    per_rank = replace(RECIPE, regularize=replace(RECIPE.regularize, batch_norm="per-rank"))
    assert changed(per_rank) == {"batch norm"}
    hook = msgspec.convert({"hook": "bf16"}, type(Placement().ddp))
    assert changed(RECIPE, ddp=hook) == {"strategy"}


def test_accuracy_is_compared_with_one_process_of_the_same_recipe_only(folder: Folder) -> None:
    single = Placement(ranks=1, threads=1, launcher="single", device="cpu", strategy="single")
    twin = folder.run(placement=single, test_accuracy=0.95)
    other = folder.run(msgspec.structs.replace(RECIPE, global_batch=128), single, test_accuracy=0.5)
    run = folder.run(test_accuracy=0.94)
    curve(run, [0.5], [0.5])
    (found,) = accuracy.answer(Evidence(run, [twin, other]))
    assert found.figures["difference"] == pytest.approx(-0.01)
    assert found.figures["one_process_runs"] == 1


def test_only_what_was_proven_is_called_unchanged(folder: Folder) -> None:
    """Not verified unless a verify of this recipe on this kind of placement passed, and never where the twin differs."""
    from lockstep.measure.environment import version_of
    from lockstep.verify import verified

    def verdict(peers: Sequence[Run] = (), **summary: Any) -> str:
        run = folder.run(**{"test_accuracy": 0.9, **summary})
        write_atomic(run.folder / "environment.json", versions)
        curve(run, [0.5], [0.5])
        (found,) = accuracy.answer(Evidence(run, peers))
        return found.verdict

    versions = {name: version_of(name) for name in ("torch", "lockstep")}
    single = Placement(ranks=1, threads=1, launcher="single", device="cpu", strategy="single")
    near, far = (folder.run(placement=single, test_accuracy=value) for value in (0.91, 0.98))
    assert verdict().startswith("not verified: ")
    assert verdict([near]).startswith("not verified: ")
    assert verdict([far]) == "not verified, and the result differs from one process by more than noise"
    spec = folder.run().spec()
    other = msgspec.structs.replace(spec, recipe=msgspec.structs.replace(RECIPE, model="cifar-vgg"))
    verified.record(folder.root, [other], checks=9, steps=32)
    assert verdict().startswith("not verified: "), "that was another recipe"
    verified.record(folder.root, [spec], checks=9, steps=32)
    assert verdict([near]) == "distribution does not change what is computed here: verified"
    assert verdict([far]) == "verified step by step, yet the result differs from one process by more than noise"
    versions["torch"] = "1.0"
    assert verdict().startswith("not verified: "), "that was another torch"


def test_precision_is_judged_by_pairs_of_one_seed(folder: Folder) -> None:
    runs = []
    for seed in range(8):
        for name, seconds in (("fp32", 10.0), ("bf16", 7.0)):
            recipe = msgspec.structs.replace(RECIPE, seed=seed, precision=name)
            run = folder.run(
                recipe,
                test_accuracy=0.9 + seed / 1000,
                train_seconds=seconds * (1 + seed / 100),
                memory_growth_bytes=[10, 10],
            )
            curve(run, [0.5], [0.5])
            runs.append(run)
    (found,) = precision.answer(Evidence(runs[0], runs))
    assert found.figures["time_ratio"] == pytest.approx(0.7)
    assert found.verdict.endswith("worth it")
    assert "not worth" not in found.verdict
    assert found.figures["pairs"] == 8
    assert not list(precision.answer(Evidence(runs[0]))), "an fp32 run alone says nothing about it"


def test_precision_says_no_more_than_its_pairs_do(folder: Folder) -> None:
    def run(name: str, seed: int, seconds: float, **summary: Any) -> Run:
        recipe = msgspec.structs.replace(RECIPE, seed=seed, precision=name)
        return folder.run(recipe, train_seconds=seconds, **summary)

    def found(*runs: Run) -> Any:
        return next(precision.answer(Evidence(runs[0], runs)))

    untested = found(*(run(name, seed, 10.0 - seed / 10) for seed in range(3) for name in ("bf16", "fp32")))
    assert "accuracy not tested" in untested.why
    alike = found(*(run(name, seed, 10.0 + seed / 1000) for seed in range(8) for name in ("bf16", "fp32")))
    assert alike.verdict == "bf16 takes as long as fp32 here: it saves no time"
    assert (alike.cost, alike.next) == (0.0, "precision=fp32")
    one = found(run("bf16", 1, 7.0), *(run("fp32", 1, 10.0 + k) for k in range(3)))
    assert one.figures["pairs"] == 1, "one run has one partner"
    assert "not settled" in one.verdict
    strangers = found(run("bf16", 1, 7.0), run("fp32", 2, 10.0))
    assert "no bf16 and fp32 run have the same seed" in strangers.verdict


def test_the_recommendation_is_the_least_time_to_an_accuracy(folder: Folder) -> None:
    def runs(batch: int, seconds: float, reaches: float) -> list[Run]:
        made = []
        for seed in range(8):
            run = folder.run(
                msgspec.structs.replace(RECIPE, seed=seed, global_batch=batch),
                test_accuracy=reaches,
                train_seconds=2 * seconds,
            )
            for number, value in ((1, reaches / 2), (2, reaches)):
                append_line(
                    run.folder / "epochs.jsonl",
                    {"epoch": number, "train_seconds": seconds * (1 + seed / 50), "test_accuracy": value},
                )
            made.append(run)
        return made

    slow, fast, poor = runs(64, 10.0, 0.95), runs(128, 6.0, 0.96), runs(256, 1.0, 0.60)
    (found,) = recommend.answer(Evidence(slow[0], [*slow, *fast, *poor], target=0.9))
    assert found.figures["best"] == "global_batch=128"
    assert found.figures["saved"] == pytest.approx(0.4)
    assert found.next == "global_batch=128"
    (found,) = recommend.answer(Evidence(fast[0], [*slow, *fast, *poor], target=0.9))
    assert "nothing that was run here reaches 90.0% sooner" in found.verdict
    (found,) = recommend.answer(Evidence(slow[0], [*slow, *fast, *poor]))
    assert found.figures["target"] == pytest.approx(0.945), "what learned less is no replacement"
    assert found.figures["best"] == "global_batch=128"
    (found,) = recommend.answer(Evidence(slow[0], [*slow[:2], *fast[:2]], target=0.9))
    assert ("not significant" in found.verdict or "too few" in found.verdict, found.next) == (
        True,
        "repeat both with another seed: seed=2",
    )


def test_findings_come_with_the_costliest_first(folder: Folder) -> None:
    run = folder.run(test_accuracy=0.9)
    curve(run, [0.5], [0.5])
    write_steps(
        run,
        rows(100, data=100, backward=1000, exchange=1100, total=2200),
        rows(100, data=100, backward=1000, exchange=1100, total=2200),
    )
    found = explain(Evidence(run))
    assert [each.cost for each in found] == sorted((each.cost for each in found), reverse=True)
    assert found[0].question == "speed-up", "half of the step is exchange"
    assert {each.question for each in found} >= {"step", "speed-up", "straggler", "accuracy", "overfitting"}


def test_a_step_that_cannot_be_taken_apart_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="quantize=off"):
        probe.measure(Recipe(quantize="qat"), Placement(), tmp_path / "ways", Probe())
    assert not (tmp_path / "ways").exists()
