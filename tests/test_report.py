"""The report's document, on run folders written as runs leave them: every number in it is known beforehand; and what is made of it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from lockstep.backends.costs.cells import Cell
from lockstep.cli.compare import print_comparison
from lockstep.machine.cores import cores
from lockstep.measure.phases import common
from lockstep.measure.records import ROW, mean_losses
from lockstep.metrics import METRICS, USUAL
from lockstep.placement import Placement
from lockstep.plan import plan
from lockstep.predict import check
from lockstep.predict.fit import Fit, folder, save
from lockstep.predict.here import as_asked, here
from lockstep.predict.model import Case, predict
from lockstep.recipe import Optimizer, Recipe, Schedule
from lockstep.recipes import REPORTS
from lockstep.report import along, curves, exchange, factors, pace, setup, spread, steps, timeline
from lockstep.report.document import report
from lockstep.report.html import page
from lockstep.report.subject import Subject, of_names, of_runs, of_study
from lockstep.report.views import Axis, Bars, Lines, Points, Report, Scatter, Waterfall
from lockstep.run import Options, Run, Spec, append_line, write_atomic
from lockstep.settings import load
from lockstep.study.compare import study_document
from lockstep.study.definition import Claim, Published, PublishedEpoch, Study
from lockstep.study.folder import StudyFolder
from lockstep.study.plan import Cell as PlannedCell
from lockstep.study.plan import Item, Planned
from lockstep.ways import BESIDE, FILE, Way
from support import empty_cache
from test_predict import planted

EPOCHS = 10
RECIPE = Recipe(data="embedded", global_batch=64, epochs=EPOCHS)
ALONE = Placement(ranks=1, threads=1, launcher="single", device="cpu", backend="gloo", strategy="single")
BOTH = Placement(ranks=2, threads=1, launcher="spawn", device="cpu", backend="gloo", strategy="ddp")
HOSTILE = '</script><img src=x onerror=alert(1)> & "quoted" {{script}} \u2028 ünï 日本'
PHASES = {"data": 100, "forward": 500, "backward": 900, "exchange": 300, "optimizer": 150, "total": 2000}


class Folders:
    """Writes run folders as runs leave them."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def run(
        self,
        name: str,
        recipe: Recipe = RECIPE,
        placement: Placement = BOTH,
        seconds: float = 10.0,
        accuracy: float = 0.9,
        state: str = "done",
        count: int = 40,
        **environment: Any,
    ) -> Run:
        worked = plan(recipe, placement, 1000, 500)
        spec = Spec(
            id=name,
            created=float(recipe.seed),
            lockstep="0",
            recipe=recipe,
            placement=placement,
            plan=worked,
            options=Options(),
        )
        run = Run.create(self.root, spec)
        for epoch in range(1, recipe.epochs + 1):
            append_line(run.folder / "epochs.jsonl", self.epoch(epoch, seconds, accuracy))
            for rank in range(placement.ranks):
                own = {"epoch": epoch, "rank": rank, **train(epoch, 0.01 * (rank - (placement.ranks - 1) / 2))}
                append_line(run.rank_folder(rank) / "epochs.jsonl", own)
        for rank in range(placement.ranks):
            step_rows(count, rank).tofile(run.rank_folder(rank) / "steps.bin")
        here = {
            "host": "h",
            "cpu": "a processor",
            "cores_machine": 2,
            "torch": "2.0",
            "memory_bytes": 8e9,
            **environment,
        }
        write_atomic(run.folder / "environment.json", here, durable=False)
        if state == "done":
            write_atomic(run.folder / "summary.json", self.summary(placement, seconds, accuracy), durable=False)
        run.write_status(state, **({} if state == "done" else {"cause": "rank 1: MemoryError"}))
        return run

    @staticmethod
    def epoch(epoch: int, seconds: float, accuracy: float) -> dict[str, Any]:
        return {
            "epoch": epoch,
            "samples": 1000,
            "test_loss": 0.5 + 0.02 * abs(epoch - 5),  # least in epoch 5
            "test_accuracy": accuracy - 0.2 / epoch + 0.2 / EPOCHS,
            "test_samples": 500,
            "train_seconds": seconds / EPOCHS,
            **train(epoch, 0.0),
        }

    @staticmethod
    def summary(placement: Placement, seconds: float, accuracy: float) -> dict[str, Any]:
        return {
            "steps": 120,
            "train_seconds": seconds,
            "test_accuracy": accuracy,
            "train_images": 10_000,
            "images_per_second": 10_000 / seconds,
            "test_samples": 500,
            "memory_growth_bytes": [50_000_000] * placement.ranks,
            "ranks_agree": True,
        }


def train(epoch: int, more: float) -> dict[str, float]:
    return {"train_loss": 1 / epoch + more, "train_accuracy": 1 - 0.5 / epoch - more}


def step_rows(count: int, rank: int = 0, start_ns: int = 1_000_000_000) -> np.ndarray[Any, Any]:
    """Steps with known phases; rank 1 exchanges for 200 µs less, because it comes last, and computes longer instead."""
    rows = np.zeros(count, dtype=ROW)
    rows["step"], rows["epoch"], rows["samples"] = np.arange(1, count + 1), 1, 32
    rows["warmup"] = rows["step"] <= 10
    for name, value in PHASES.items():
        rows[f"{name}_ns"] = value * 1000
    rows["exchange_ns"] -= 200_000 * rank
    rows["backward_ns"] += 200_000 * rank
    rows["start_ns"] = start_ns + np.arange(count) * 2_000_000
    rows["loss_sum"] = 32.0 / rows["step"]
    return rows


def isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folders:
    empty_cache(tmp_path / "cache", monkeypatch)
    return Folders(tmp_path / "runs")


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folders:
    return isolated(tmp_path, monkeypatch)


def chart(subject: Subject | Report, name: str) -> Any:
    charts = report([subject]).parts[0].charts if isinstance(subject, Subject) else subject.parts[0].charts
    return next(each for each in charts if each.id == name)


def line(found: Lines, name: str) -> Any:
    return next(each for each in found.series if each.name == name)


# ---------------------------------------------------------------- a run


def test_learning_curves_are_the_runs_own_numbers_with_the_spread_of_its_ranks(folders: Folders) -> None:
    run = folders.run("one")
    loss = chart(of_runs([run]), "loss")
    test, trained = line(loss, "test"), line(loss, "train")
    assert test.x == [epoch["epoch"] for epoch in run.epochs()]
    assert test.y == pytest.approx([epoch["test_loss"] for epoch in run.epochs()], rel=1e-5)
    assert trained.y == pytest.approx([epoch["train_loss"] for epoch in run.epochs()], rel=1e-5)
    assert trained.low == pytest.approx([1 / epoch - 0.005 for epoch in test.x], rel=1e-5)
    assert trained.high == pytest.approx([1 / epoch + 0.005 for epoch in test.x], rel=1e-5)
    assert line(loss, "rank 1").y == pytest.approx([e["train_loss"] for e in run.epochs(1)], rel=1e-5)
    assert loss.hidden == ["ranks"], "ranks are shown on demand"


def test_the_epoch_since_which_it_overfits_is_marked(folders: Folders) -> None:
    marks = chart(of_runs([folders.run("one")]), "loss").marks
    assert [(mark.x, mark.text) for mark in marks] == [(5, "overfitting since epoch 5")]


def test_a_long_curve_keeps_its_ends_and_its_peaks() -> None:
    curve = np.random.default_rng(1).normal(0, 1, 50_000)
    curve[31_234], curve[777] = 50.0, -50.0
    kept = curves.thin(curve.tolist())
    assert len(kept) <= curves.MOST_POINTS
    assert {0, 777, 31_234, 49_999} <= set(kept)
    assert curves.thin([1.0, 2.0]) == [0, 1]


def way_of(ranks: Sequence[np.ndarray[Any, Any]], per_epoch: int = 10) -> along.Along:
    samples = np.sum([rows["samples"] for rows in ranks], axis=0)
    return along.of_steps(ranks[0]["step"], samples, along.seconds_of(ranks[0]), per_epoch)


def test_the_loss_by_step_is_of_all_ranks_samples() -> None:
    first, second = step_rows(5), step_rows(7, rank=1)
    second["samples"], second["loss_sum"] = 16, 8.0
    ranks = common([first, second])
    found = curves.step_series(way_of(ranks), mean_losses(ranks), "loss", "c0")
    assert found is not None
    assert found.x == [1, 2, 3, 4, 5], "steps that both ranks have written"
    assert found.y == pytest.approx([(32 / step + 8) / 48 for step in found.x], rel=1e-5)


def test_the_loss_of_many_steps_is_means_of_stretches_within_their_bands() -> None:
    rows = step_rows(30_000)
    found = curves.step_series(way_of([rows]), mean_losses([rows]), "loss", "c0")
    assert found is not None
    assert len(found.y) == curves.MOST_POINTS
    parts = (rows["loss_sum"] / 32).reshape(300, 100)
    assert found.y == pytest.approx(parts.mean(axis=1).tolist(), rel=1e-5)
    assert found.low == pytest.approx(parts.min(axis=1).tolist(), rel=1e-5)
    assert found.high == pytest.approx(parts.max(axis=1).tolist(), rel=1e-5)


def test_points_of_a_curve_are_known_by_step_sample_second_and_epoch(folders: Folders) -> None:
    run = folders.run("one")
    accuracy = chart(of_runs([run]), "accuracy")
    assert [axis.label for axis in accuracy.over] == ["samples", "training time"], "these records have no steps"
    assert line(accuracy, "test").over[0][:3] == [1000, 2000, 3000]
    assert line(accuracy, "rank 1").over[1][:3] == [1, 2, 3], "seconds of training"
    assert accuracy.marks[0].over == [5000, 5], "overfitting since epoch 5"
    steps = chart(of_runs([run]), "loss-by-step")
    assert [axis.label for axis in steps.over] == ["samples", "training time", "epochs"]
    samples, seconds, epochs = steps.series[0].over
    assert samples[:3] == [64, 128, 192]
    assert seconds[:3] == pytest.approx([0.002, 0.004, 0.006])
    assert epochs[15] == 1, "16 steps an epoch"


def test_what_lies_between_epochs_is_no_training() -> None:
    rows = step_rows(6)
    rows["epoch"] = [1, 1, 1, 2, 2, 2]
    rows["start_ns"][3:] += 5_000_000_000  # tests, and a checkpoint
    rows["start_ns"][5:] += 3_000_000  # a break within an epoch
    assert along.seconds_of(rows) == pytest.approx([0.002] * 5 + [0.005])
    rows["start_ns"][2:] -= 900_000_000  # written by another process, after a restart
    assert along.seconds_of(rows)[2] == pytest.approx(0.002)


def test_rate_learning_rate_and_memory_over_time(folders: Folders) -> None:
    recipe = msgspec.structs.replace(RECIPE, schedule=Schedule(name="cosine", warmup_steps=10))
    run = folders.run("one", recipe)
    found = {each.id: each for each in pace.charts(of_runs([run]))}
    assert list(found) == ["rate", "learning-rate"], "its epochs have no memory on record"
    assert set(line(found["rate"], "rate").y) == {32_000}, "64 samples in 2 ms"
    rates = line(found["learning-rate"], "learning rate")
    assert len(rates.y) == 120, "as many steps as were taken"
    lr = run.spec().plan.lr
    assert [rates.y[0], rates.y[9]] == pytest.approx([lr / 10, lr], rel=1e-5)
    assert rates.y[-1] < lr / 2
    for rank in (0, 1):
        epochs = [{**each, "memory_growth_bytes": 1_000_000 * each["epoch"]} for each in run.epochs(rank)]
        (run.rank_folder(rank) / "epochs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in epochs))
    memory = next(each for each in pace.charts(of_runs([run])) if each.id == "memory")
    assert memory.series[0].y[:2] == [2_000_000, 4_000_000], "of both ranks"
    assert not [each for each in pace.charts(of_runs([folders.run("plain")])) if each.id == "learning-rate"], "constant"


def test_the_rate_is_known_by_epoch_where_the_steps_are_gone(folders: Folders) -> None:
    run = folders.run("one")
    for rank in (0, 1):
        (run.rank_folder(rank) / "steps.bin").unlink()
    lines = [{**each, "images_per_second": 500.0 + each["epoch"]} for each in run.epochs()]
    (run.folder / "epochs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    (found,) = pace.charts(of_runs([run]))
    assert found.x.label == "epoch"
    assert found.series[0].y[:2] == [501, 502]


def test_how_long_steps_take_has_the_median_and_the_slow_ones(folders: Folders) -> None:
    run = folders.run("one", count=1010)
    rows = step_rows(1010)
    rows["total_ns"] = 2_000_000 + 1000 * np.random.default_rng(3).permutation(1010)
    rows["total_ns"][500] = 3_000_000_000
    rows.tofile(run.rank_folder(0) / "steps.bin")
    (found,) = spread.charts(of_runs([run]))
    assert sum(found.series[0].y) == pytest.approx(0.99, abs=0.005), "shares of all steps"
    assert max(found.series[0].x) < 0.0031, "one that took 3 s leaves the others their room"
    assert found.says.endswith("The slowest one took 3.00 s.")
    times = rows["total_ns"][10:] / 1e9
    assert [mark.x for mark in found.marks] == pytest.approx([np.median(times), np.quantile(times, 0.95)], rel=1e-5)
    assert spread.charts(of_runs([folders.run("short", count=25)])) == [], "too few"
    both = spread.charts(of_runs([run, folders.run("other", placement=ALONE)]))[0]
    assert both.series[1].name.endswith(": median 2.00 ms, 95 % within 2.00 ms")
    assert both.marks == []


def test_where_a_step_goes_by_rank_adds_up_to_the_step(folders: Folders) -> None:
    (bars,) = (each for each in steps.charts(of_runs([folders.run("one")])) if isinstance(each, Bars))
    found = {row.name: dict(zip(bars.parts, row.values, strict=True)) for row in bars.rows}
    for row in bars.rows:
        assert sum(row.values) == pytest.approx(2e-3)
    assert found["rank 0"]["waiting"] == pytest.approx(200e-6), "rank 1 comes last"
    assert found["rank 0"]["exchange"] == found["rank 1"]["exchange"] == pytest.approx(100e-6)
    assert found["all ranks, mean"]["backward"] == pytest.approx(1000e-6)


def test_the_waterfall_falls_from_the_ideal_to_the_measured_speed_up(folders: Folders) -> None:
    run = folders.run("one")
    assert not [each for each in steps.charts(of_runs([run])) if isinstance(each, Waterfall)], "not measured yet"
    parts = {
        **dict.fromkeys(("data", "forward", "backward", "optimizer", "other", "total"), 0.0),
        "exchange": 1e-3,
        "waiting": 5e-4,
    }

    def way(name: str, seconds: float, ranks: int) -> Way:
        return Way(
            name=name,
            samples=32,
            ranks=ranks,
            threads=1,
            steps=5,
            rounds=[[seconds] * ranks] * 5,
            phases=[parts] * ranks,
        )

    measured = [way("whole", 16e-3, 1), way("plain", 9e-3, 1), way("apart", 9.5e-3, 2), way("together", 11.2e-3, 2)]
    beside = Run(run.folder / BESIDE)
    beside.folder.mkdir(parents=True)
    write_atomic(beside.folder / FILE, {"ways": msgspec.to_builtins(measured)})
    beside.write_status("done")
    (fall,) = (each for each in steps.charts(of_runs([run])) if isinstance(each, Waterfall))
    rows = {row.name: row for row in fall.rows}
    assert rows["ideal"].value == pytest.approx(8e-3)
    assert rows["ideal"].text == "8.00 ms (8.00–8.00), 2.00×"
    assert rows["contention"].text == "+500 µs (500–500), 1.68×"
    assert rows["exchange"].value == pytest.approx(1e-3)
    assert sum(row.value for row in fall.rows[:-1]) == pytest.approx(rows["measured"].value) == pytest.approx(11.2e-3)
    assert rows["measured"].text == "11.2 ms, 1.43×"


def test_a_timeline_from_step_records(folders: Folders) -> None:
    (found,) = timeline.charts(of_runs([folders.run("one")]))
    first, second = found.lanes
    phases = [(found.parts[part.part], round(1e6 * part.begin), round(1e6 * part.end)) for part in first.spans[:6]]
    assert phases == [
        ("data", 0, 100),
        ("forward", 100, 600),
        ("backward", 600, 1500),
        ("exchange", 1500, 1800),
        ("optimizer", 1800, 1950),
        ("other", 1950, 2000),
    ]
    assert len(second.spans) == 6 * timeline.STEPS
    assert [mark.text for mark in found.marks] == ["step 21", "step 22", "step 23", "step 24"]


def test_ranks_of_another_host_are_put_on_one_clock(folders: Folders) -> None:
    run = folders.run("one")
    # As another host counts its time. Rank 1 exchanges for 200 µs less and backs up 200 µs longer, so the exchange ends at the same time.
    step_rows(40, rank=1, start_ns=987_654_321_000_000).tofile(run.rank_folder(1) / "steps.bin")
    (found,) = timeline.charts(of_runs([run]))
    assert [span.begin for lane in found.lanes for span in lane.spans[:1]] == pytest.approx([0, 0], abs=1e-9)
    assert "moved" in found.says


def test_a_timeline_from_a_trace_shows_the_buckets(folders: Folders) -> None:
    run = folders.run("one")
    for rank in (0, 1):
        events = [
            span_event(rank, "step", "step 11", 1000 + rank, 900, step=11),
            span_event(rank, "phase", "forward", 1000 + rank, 400, step=11),
            span_event(rank, "phase", "backward", 1400 + rank, 500, step=11),
            span_event(rank, "exchange", "exchange bucket 0", 1600 + rank, 250, step=11, bucket=0, bytes=17064),
        ]
        about = {"format": 1, "run": "one", "strategy": "ddp", "host": "h", "clock": "c"}
        content = {"lockstep": about, "distributedInfo": {"rank": rank}, "traceEvents": events}
        write_atomic(run.rank_folder(rank) / "trace.json", content)
    (found,) = timeline.charts(of_runs([run]))
    assert [lane.name for lane in found.lanes] == ["rank 0", "buckets", "rank 1", "buckets"]
    assert found.lanes[1].spans[0].text == "bucket 0, 17,064 B"
    assert [found.lanes[1].spans[0].begin, found.lanes[1].spans[0].end] == pytest.approx([600e-6, 850e-6])
    assert found.lanes[2].spans[0].begin == pytest.approx(1e-6)


def span_event(rank: int, kind: str, name: str, begin: float, took: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "pid": rank, "tid": 0, "ts": begin, "dur": took, "args": more}


def test_a_run_that_failed_says_so_and_shows_what_there_is(folders: Folders) -> None:
    found = report([of_runs([folders.run("one", state="failed")])]).parts[0]
    assert found.findings[0].findings[0].verdict == "failed: rank 1: MemoryError"
    assert dict(found.facts)["state"] == "failed"
    assert {each.id for each in found.charts} >= {"loss", "step", "timeline"}


def test_a_run_that_was_never_started_makes_a_page_too(folders: Folders) -> None:
    spec = Spec(
        id="new",
        created=0.0,
        lockstep="0",
        recipe=RECIPE,
        placement=BOTH,
        plan=plan(RECIPE, BOTH, 1000, 500),
        options=Options(),
    )
    found = report([of_runs([Run.create(folders.root, spec)])])
    assert found.parts[0].charts == []
    assert "<title>new – Lockstep report</title>" in page(found)


def test_a_loop_without_accuracy_shows_what_it_has(folders: Folders) -> None:
    run = folders.run("own")
    lines = [{**epoch, **dict.fromkeys(("test_loss", "test_accuracy", "train_accuracy"))} for epoch in run.epochs()]
    (run.folder / "epochs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    write_atomic(
        run.folder / "summary.json", {"train_seconds": 10.0, "images_per_second": 1000.0, "test_accuracy": None}
    )
    found = report([of_runs([run])]).parts[0]
    assert [each.name for each in chart(of_runs([run]), "loss").series] == ["train", "rank 0", "rank 1"]
    assert "test accuracy" not in dict(found.facts)


def test_an_all_reduce_over_message_size() -> None:
    def cell(size: int, us: float, **more: Any) -> Cell:
        usual = {
            "backend": "gloo",
            "device": "cpu",
            "ranks": 2,
            "collective": "all_reduce",
            "bytes": size,
            "message_bytes": size,
        }
        figures = {"median_us": us, "p5_us": us / 2, "p95_us": us * 2, "bus_gbs": size / us / 1e3}
        return Cell(**{**usual, **figures, **more})

    cells = [
        cell(1024, 100.0),
        cell(4, 40.0),
        cell(64, 50.0, state="WRONG"),
        cell(4, 9.0, collective="broadcast"),
        cell(4, 3.0, backend="shm"),
    ]
    latency, bandwidth = exchange.of_cells(cells)
    assert [(one.name, one.x, one.y) for one in latency.series] == [
        ("gloo", [4, 1024], [40e-6, 100e-6]),
        ("shm", [4], [3e-6]),
    ]
    assert latency.series[0].high == [80e-6, 200e-6]
    assert bandwidth.series[0].y == pytest.approx([4 / 40e3, 1024 / 100e3])


# ---------------------------------------------------------------- several runs, and studies


def compared(folders: Folders, repeats: int = 5) -> list[Run]:
    """One rank in 10 s, two in 6.25 s, and SGD with 40 points less accuracy."""
    runs = []
    for seed, noise in enumerate((1.0, 1.01, 0.99, 1.02, 0.98)[:repeats]):
        recipe = msgspec.structs.replace(RECIPE, seed=seed)
        worse = msgspec.structs.replace(recipe, optimizer=Optimizer(name="sgd"))
        runs.append(folders.run(f"a-{seed}", recipe, ALONE, 10 * noise, 0.9))
        runs.append(folders.run(f"b-{seed}", recipe, BOTH, 6.25 * noise, 0.9))
        runs.append(folders.run(f"c-{seed}", worse, ALONE, 10 * noise, 0.5 + seed / 1000))
    return runs


def test_speed_up_over_cores_with_the_ideal_line(folders: Folders) -> None:
    found = chart(of_runs(compared(folders)), "scaling")
    ideal = line(found, "ideal")
    assert list(zip(ideal.x, ideal.y, strict=True)) == [(1, 1), (2, 2)]
    strong = line(found, "strong scaling (same global batch)")
    assert list(zip(strong.x, strong.y, strict=True)) == [(1, 1), (2, pytest.approx(1.6))]
    assert strong.low[1] == pytest.approx(1.6, rel=0.01)


def fit_for(run: Run) -> Fit:
    """What this machine would know of the run's recipe after `lockstep predict`, and how well such fits have held."""
    recipe, placement, _ = here(run.spec().recipe, as_asked(run.spec()))
    made = planted(recipe=recipe, placement=placement)
    save(made)
    kinds = {
        kind: {"n": 8, "placements": 8, "spread": 0.1, "most_ranks": ranks}
        for kind, ranks in (("batch", 1), ("ranks", 2))
    }
    figures = {
        "n": 16,
        "median_error": 0.1,
        "ninth_decile": 0.2,
        "worst_error": 0.25,
        "nine_of_ten_held": 0.9,
        "kinds": kinds,
    }
    write_atomic(folder() / check.FILE, {"format": check.FORMAT, "time": 0.0, "quick": True, **figures})
    return made


@pytest.mark.skipif(cores() < 2, reason="needs two cores: predictions fill the host with ranks")
def test_the_scaling_curve_has_the_prediction_of_a_fit_with_its_band(folders: Folders) -> None:
    runs = compared(folders, 2)
    assert [each.name for each in chart(of_runs(runs), "scaling").series] == [
        "ideal",
        "strong scaling (same global batch)",
    ]
    made = fit_for(runs[0])
    found = line(chart(of_runs(runs), "scaling"), "predicted, strong")
    assert found.x == [1, 2, 4, 8], "four times as far as the runs"
    step = {ranks: predict(made, Case(micro=64 // ranks, per_host=ranks)).seconds for ranks in (1, 2)}
    assert found.y[:2] == pytest.approx([1.0, step[1] / step[2]], rel=1e-5)
    # Student's t with 8 degrees of freedom: 90 % of such errors are within 1.86 times their size.
    factor = math.exp(1.8595 * 0.1)
    assert found.low[:2] == pytest.approx([y / factor for y in found.y[:2]], rel=1e-3)
    assert found.high[:2] == pytest.approx([y * factor for y in found.y[:2]], rel=1e-3)
    assert found.low[2:] == found.high[2:] == [None, None], "no band where nothing was checked"
    assert page(report([of_runs(runs)]))


def test_time_against_accuracy_with_memory_as_size(folders: Folders) -> None:
    found = chart(of_runs(compared(folders)), "trade-off")
    assert isinstance(found, Scatter)
    assert [(dot.x, dot.y, dot.size) for dot in found.dots] == [(10, 0.9, 50e6), (6.25, 0.9, 100e6), (10, 0.502, 50e6)]
    assert found.dots[0].x_low < 10 < found.dots[0].x_high


def test_the_table_has_verdicts_and_greys_what_is_not_significant(folders: Folders) -> None:
    part = report([of_runs(compared(folders))]).parts[0]
    assert part.table is not None
    time = part.table.columns.index("training time")
    accuracy = part.table.columns.index("test accuracy")
    alone, both, worse = part.table.rows
    assert alone[time].text.startswith("10.0 s (9.8")
    assert (alone[time].value, alone[time].notes, alone[time].faint) == (10, ["baseline"], False)
    assert both[time].notes == ["0.625× (0.625–0.625)", "faster"]
    assert (both[accuracy].notes, both[accuracy].faint) == (["+0.00 points (+0.00 to +0.00)", "the same"], True)
    assert worse[accuracy].notes[0].startswith("−39.80 points")
    assert not worse[accuracy].faint
    assert both[part.table.columns.index("speed-up")].text == "1.60×"
    assert both[part.table.columns.index("efficiency")].text == "80%"
    assert [said.verdict for said in part.headlines] == [
        "2 ranks with strategy ddp train 1.60 times as fast as 1 rank, with the same accuracy; not settled: memory (between 1.0 and 2.0 times)",
        "sgd trains as fast as adam and loses 40 points of accuracy, with the same memory",
    ]


def test_settings_that_differ_are_told_from_those_that_do_not(folders: Folders) -> None:
    part = report([of_runs(compared(folders, 2))]).parts[0]
    assert part.settings is not None
    assert part.same is not None
    differ = {row[0].text: [cell.text for cell in row[2:]] for row in part.settings.rows}
    assert differ["ranks"] == ["1", "2", "1"]
    assert differ["optimizer.name"] == ["adam", "adam", "sgd"]
    assert "seed" not in differ
    assert ["epochs", "recipe", "10"] in [[cell.text for cell in row] for row in part.same.rows]


def test_the_commands_come_to_the_same_recipe_and_placement_again(folders: Folders) -> None:
    recipe = Recipe(
        data="embedded",
        batch_per_rank=16,
        global_batch=32,
        model_args={"k": 3},
        optimizer=Optimizer(name="sgd", momentum=0.9),
        shuffle=False,
    )
    placement = Placement(
        ranks=2,
        hosts=2,
        emulated=True,
        link="1gbit,0.5ms",
        threads=1,
        launcher="torchrun",
        device="cpu",
        backend="gloo",
        strategy="ddp",
    )
    words = setup.run_words(folders.run("one", recipe, placement).spec())
    assert words[:2] == ["lockstep", "run"]
    assert load([], words[2:]) == (
        msgspec.structs.replace(recipe, global_batch=load([], [])[0].global_batch),
        placement,
    )


def study_folder(
    folders: Folders,
    cells: dict[str, tuple[Recipe, Placement]],
    repeats: int,
    metrics: Sequence[str] = USUAL,
    **runs: Any,
) -> StudyFolder:
    """A study with all of its runs done: the first cell takes 10 s, each of the others a tenth less than the one before."""
    folder = StudyFolder(folders.root / "studies" / "mine")
    folder.path.mkdir(parents=True)
    items, planned = [], []
    for place, (name, (recipe, placement)) in enumerate(cells.items()):
        planned.append(
            PlannedCell(name=name, recipe=recipe, placement=placement, plan=plan(recipe, placement, 1000, 500))
        )
        for repeat in range(repeats):
            digest = hashlib.sha256(f"{name} {repeat}".encode()).hexdigest()[:12]
            items.append(Item(cell=name, repeat=repeat, seed=repeat, digest=digest))
            folder.begins(items[-1], f"run-{repeat}-{place}")
            own = msgspec.structs.replace(recipe, seed=repeat)
            noise = 1 + 0.01 * ((repeat * 7 + place) % 3 - 1)
            folders.run(
                f"run-{repeat}-{place}",
                own,
                placement,
                10 * 0.9**place * noise,
                0.9 - 0.01 * place + repeat / 1e4,
                **runs,
            )
    names = list(cells)
    claims = [
        Claim(text="more is faster", metric="seconds", more=names[0], less=names[-1], ratio=1.5),
        Claim(text="more is worse", metric="accuracy", more=names[0], less=names[-1]),
    ]
    curve = [PublishedEpoch(1, 0.5, 0.55), PublishedEpoch(2, 0.7, 0.65, 1.1)]
    published = Published(source="A: a report", figures={names[0]: "160.7 s"}, claims=claims, curves={names[0]: curve})
    study = Study(
        name="mine",
        about="what it is about",
        cells={name: {} for name in names},
        repeats=repeats,
        published=[published],
        metrics=list(metrics),
    )
    folder.write(Planned(study=study, cells=planned, items=items))
    return folder


def test_published_figures_stand_beside_the_measured_ones(folders: Folders) -> None:
    study_folder(folders, {"one": (RECIPE, ALONE), "two": (RECIPE, BOTH)}, 3)
    part = report(of_names(["mine"], folders.root)).parts[0]
    assert (part.kind, part.about) == ("study", f"what it is about. {REPORTS}.")
    assert part.table is not None
    assert [row[-1].text for row in part.table.rows] == ["160.7 s", ""]
    assert part.table.columns[-1] == "published (A)"
    time, accuracy = part.published[0].claims
    assert time.figures.startswith("published 1.50×, here 1.1")
    assert accuracy.figures.startswith("here +1.00 points"), "a difference, not a ratio"


def test_a_published_curve_is_drawn_beside_ours(folders: Folders) -> None:
    study_folder(folders, {"one": (RECIPE, ALONE), "two": (RECIPE, BOTH)}, 3)
    part = report(of_names(["mine"], folders.root)).parts[0]
    accuracy, loss = (chart for chart in part.charts if chart.id in ("accuracy", "loss"))
    assert isinstance(accuracy, Lines)
    assert isinstance(loss, Lines)
    drawn = {line.name: line for line in accuracy.series if "published" in line.name}
    assert list(drawn) == ["one, test published, A", "one, train published, A"]
    assert drawn["one, test published, A"].y == [0.55, 0.65]
    assert (drawn["one, test published, A"].role, drawn["one, train published, A"].role) == ("published", "train")
    (test_loss,) = [line for line in loss.series if "published" in line.name]
    assert (test_loss.x, test_loss.y) == ([2], [1.1]), "where the report has it"


def test_every_metric_is_drawn_by_page_terminal_and_plots(
    folders: Folders, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = study_folder(folders, {"one": (RECIPE, ALONE), "two": (RECIPE, BOTH)}, 3, list(METRICS))
    part = report(of_names(["mine"], folders.root)).parts[0]
    assert part.table is not None
    first = 2  # after the cell and its runs
    assert part.table.columns[first + 4 : first + 6] == ["accuracy as deployed", "CPU time"]
    figures = [row[first : first + len(METRICS)] for row in part.table.rows]
    # These runs tell no CPU time, bytes of tensors are counted in races alone, and other tasks have other measures; all else is there.
    assert {name for row in figures for name, cell in zip(METRICS, row, strict=True) if cell.text == "–"} == {
        "cpu_seconds",
        "tensor_memory",
        "loss",
        "top5",
        "mae",
        "perplexity",
    }
    monkeypatch.setenv("COLUMNS", "600")
    print_comparison(of_study(folder), None, plot=True)
    shown = capsys.readouterr().out
    target = study_document(folder)["target_accuracy"]
    assert all(metric.title(target) in shown for metric in METRICS.values())
    assert "100 MB" in shown
    bars = [line for line in shown.splitlines() if line.startswith(("one █", "two █"))]
    assert len(bars) == 2 * (3 + 1), "of the first three metrics, and where a step goes"


# ---------------------------------------------------------------- against a factor


def test_a_number_that_cells_differ_in_has_a_plot_for_each_metric_on_a_logarithmic_axis(folders: Folders) -> None:
    cells = {f"batch {n}": (msgspec.structs.replace(RECIPE, global_batch=n), ALONE) for n in (64, 16, 32)}
    subject = of_study(study_folder(folders, cells, 5))
    found = {each.id: each for each in factors.charts(subject)}
    assert list(found) == ["accuracy-by-global_batch", "seconds-by-global_batch", "memory-by-global_batch"]
    time = found["seconds-by-global_batch"]
    assert isinstance(time, Lines)
    assert time.title == "Training time over global batch"
    assert time.x == Axis("global batch", log=True, ticks=[16, 32, 64])
    (only,) = time.series
    assert (only.x, only.texts) == ([16, 32, 64], ["batch 16", "batch 32", "batch 64"])
    table = {cell["cell"]: cell["metrics"]["seconds"] for cell in subject.comparison["cells"]}
    assert only.y == pytest.approx([table[name]["median"] for name in only.texts], rel=1e-5)
    assert only.high == pytest.approx([table[name]["high"] for name in only.texts], rel=1e-5)


def test_cells_lie_on_the_line_of_what_is_kept_and_of_what_grows_with_the_factor(folders: Folders) -> None:
    def cell(batch: int, passes: int) -> tuple[Recipe, Placement]:
        return msgspec.structs.replace(RECIPE, global_batch=batch), msgspec.structs.replace(BOTH, accumulation=passes)

    cells = {"plain": cell(64, 1), "four": cell(256, 4), "eight": cell(512, 8), "four, same": cell(64, 4)}
    time = next(each for each in factors.charts(of_study(study_folder(folders, cells, 3))) if "seconds" in each.id)
    assert isinstance(time, Lines)
    assert {one.name: one.texts for one in time.series} == {
        "global_batch=64": ["plain", "four, same"],
        "global_batch = 64 × accumulation": ["plain", "four", "eight"],
    }


def test_ranks_are_a_factor_whatever_one_process_has_no_choice_of(folders: Folders) -> None:
    runs = [folders.run("one", placement=ALONE), folders.run("two", placement=BOTH)]
    time = next(each for each in factors.charts(of_runs(runs)) if each.id == "seconds-by-ranks")
    assert isinstance(time, Lines)
    assert (time.x.log, time.series[0].x) == (False, [1, 2])
    assert time.says == "Each cell was made once, so there are no intervals."


def test_cells_without_a_number_in_common_stand_by_their_names(folders: Folders) -> None:
    cells = {name: (msgspec.structs.replace(RECIPE, optimizer=Optimizer(name=name)), ALONE) for name in ("adam", "sgd")}
    found = factors.charts(of_study(study_folder(folders, cells, 3)))
    assert [each.id for each in found] == ["accuracy-by-cell", "seconds-by-cell", "memory-by-cell"]
    assert isinstance(found[1], Points)
    assert [row.name for row in found[1].rows] == ["adam", "sgd"]
    assert found[1].rows[0].value == pytest.approx(10.0)
    assert found[1].rows[0].low is not None
