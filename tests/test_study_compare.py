"""Comparisons over run folders whose figures are made up, so that every result is known beforehand; and the index over many of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lockstep import index
from lockstep.metrics import seconds_to
from lockstep.placement import Ddp, Placement
from lockstep.plan import plan
from lockstep.reading import Damaged
from lockstep.recipe import Recipe
from lockstep.run import Run, Spec, append_line, write_atomic
from lockstep.study import compare
from lockstep.study.definition import Claim, Published, Study
from lockstep.study.folder import StudyFolder
from lockstep.study.gather import of_runs
from lockstep.study.plan import Cell, Item, Planned
from support import Cli

COUNT = iter(range(1_000_000))
DAY = 86_400.0


def finished(
    root: Path,
    recipe: Recipe,
    placement: Placement,
    seconds: float = 10.0,
    accuracy: float = 0.9,
    state: str = "done",
    created: float | None = None,
    **summary: Any,
) -> Run:
    """A run folder as a finished run leaves it: 1000 images, two epochs, the second reaching the accuracy."""
    worked = plan(recipe, placement, 1000, 100)
    spec = Spec(
        id=f"run-{next(COUNT):06d}",
        created=float(next(COUNT)) if created is None else created,
        lockstep="0",
        recipe=recipe,
        placement=placement,
        plan=worked,
    )
    run = Run.create(root, spec)
    for epoch, part in ((1, 0.8), (2, 1.0)):
        append_line(
            run.folder / "epochs.jsonl",
            {"epoch": epoch, "train_seconds": seconds / 2, "test_accuracy": accuracy * part},
        )
    usual = {
        "train_seconds": seconds,
        "test_accuracy": accuracy,
        "train_images": 2000,
        "images_per_second": 2000 / seconds,
        "test_samples": 100,
        "memory_growth_bytes": [50_000_000] * placement.ranks,
        "ranks_agree": True,
    }
    write_atomic(run.folder / "summary.json", usual | summary, durable=False)
    write_atomic(run.folder / "environment.json", {"host": "h", "cpu": "c", "torch": "2"}, durable=False)
    run.write_status(state, **({} if state == "done" else {"cause": "rank 0: MemoryError"}))
    return run


def recipe(**more: Any) -> Recipe:
    return Recipe(**{"global_batch": 32, "epochs": 2, **more})


def one(**more: Any) -> Placement:
    return Placement(
        **{"ranks": 1, "threads": 1, "launcher": "single", "backend": "gloo", "strategy": "single", **more}
    )


def two(**more: Any) -> Placement:
    return one(**{"ranks": 2, "launcher": "spawn", "strategy": "ddp", **more})


def cells_of(document: dict[str, Any]) -> dict[str, Any]:
    return {cell["cell"]: cell for cell in document["cells"]}


# ---------------------------------------------------------------- the table


def test_figures_speed_up_and_efficiency_come_out_as_put_in(tmp_path: Path) -> None:
    runs = []
    for seed, noise in enumerate((1.0, 1.01, 0.99, 1.02, 0.98)):
        runs.append(finished(tmp_path, recipe(seed=seed), one(), 10 * noise, 0.9 + seed / 1000))
        runs.append(finished(tmp_path, recipe(seed=seed), two(), 6.25 * noise, 0.9 + seed / 1000))
    document = compare.runs_document(runs)
    assert document["baseline"].startswith("launcher=single, ranks=1")
    base, cell = document["cells"]
    assert base["metrics"]["seconds"]["median"] == 10.0
    assert cell["speed_up"] == pytest.approx(1.6)
    assert cell["efficiency"] == pytest.approx(0.8)
    assert cell["metrics"]["seconds"]["against_baseline"]["verdict"] == "faster"
    assert cell["metrics"]["accuracy"]["against_baseline"]["text"] == "the same"
    assert cell["metrics"]["memory"]["median"] == pytest.approx(100e6), "bytes of both ranks"
    assert cell["recipe_differs_in"] == []
    assert any("not interleaved" in note for note in document["fairness"])
    later = finished(tmp_path, recipe(seed=9), two(), created=3 * DAY)
    assert any("made over 3.0 days" in note for note in compare.runs_document([*runs, later])["fairness"])


def test_runs_that_differ_in_the_seed_alone_are_one_cell_named_by_what_tells_it_apart(tmp_path: Path) -> None:
    runs = [finished(tmp_path, recipe(seed=seed, epochs=epochs), one()) for seed in (1, 2) for epochs in (2, 3)]
    groups = of_runs([*runs, runs[0]])
    assert {group.name: len(group.samples) for group in groups} == {"epochs=2": 2, "epochs=3": 2}


def test_a_seed_repeated_is_one_piece_of_evidence_for_accuracy_and_several_for_time(tmp_path: Path) -> None:
    runs = [
        finished(tmp_path, recipe(seed=1), where, 10 + k / 100, 0.95 - 0.01 * where.ranks)
        for k in range(8)
        for where in (one(), two())
    ]
    cell = compare.runs_document(runs)["cells"][1]
    assert cell["metrics"]["seconds"]["against_baseline"]["n"] == 8
    assert cell["metrics"]["accuracy"]["n"] == 1
    assert cell["metrics"]["accuracy"]["against_baseline"]["verdict"] == "too few"


def test_a_failed_run_is_shown_and_not_counted(tmp_path: Path) -> None:
    runs = [finished(tmp_path, recipe(seed=1), one()), finished(tmp_path, recipe(seed=1), two(), state="failed")]
    cell = compare.runs_document(runs)["cells"][1]
    assert cell["done"] == 0
    assert "rank 0: MemoryError" in cell["failed"][0]
    assert cell["metrics"] == {}


def test_holm_counts_the_comparisons_that_have_a_p_value(tmp_path: Path) -> None:
    """A cell of one run has none; one with a seed that nobody repeated has one for times and none for accuracies."""
    of_two_seeds = [
        finished(tmp_path, recipe(seed=seed), where) for seed in (1, 2) for where in (one(), two(), two(threads=2))
    ]
    single = finished(tmp_path, recipe(seed=1), two(threads=3))
    metrics = ["seconds", "accuracy"]
    assert (
        "(Holm over 2 comparisons of each)"
        in compare.table(of_runs([*of_two_seeds, single]), None, metrics, None)["family"]
    )
    assert (
        "Holm"
        not in compare.table(of_runs([*of_two_seeds[::3], *of_two_seeds[1::3], single]), None, metrics, None)["family"]
    )
    of_one_seed = [finished(tmp_path, recipe(seed=1), two(threads=4)) for _ in range(2)]
    more = [finished(tmp_path, recipe(seed=1), one())]
    document = compare.table(of_runs([*of_two_seeds, *more, *of_one_seed]), None, metrics, None)
    assert "(Holm over 2 to 3 comparisons of each)" in document["family"]


def test_time_and_cost_to_a_target(tmp_path: Path) -> None:
    epochs = [{"train_seconds": 3.0, "test_accuracy": a} for a in (0.5, 0.8, 0.7, 0.9)]
    assert [seconds_to(epochs, target) for target in (0.5, 0.8, 0.85, 0.95, None)] == [3.0, 6.0, 12.0, None, None]
    groups = of_runs([finished(tmp_path, recipe(), one(), 10, 0.9), finished(tmp_path, recipe(), two(), 6, 0.8)])
    document = compare.table(groups, None, ["seconds_to_target", "cost_to_target"], None)
    assert document["target_accuracy"] == 0.8, "what every run reached"
    values = [
        (c["metrics"]["seconds_to_target"]["median"], c["metrics"]["cost_to_target"]["median"])
        for c in document["cells"]
    ]
    assert values == [(10.0, 10.0), (6.0, 12.0)], "two ranks hold two cores"


def test_runs_that_missed_the_target_count(tmp_path: Path) -> None:
    """Twice as fast where it gets there, which is in two runs of five: not faster, and the table says how many got there."""
    runs = []
    for seed in range(5):
        runs.append(finished(tmp_path, recipe(seed=seed), one(), 10 + seed / 100, 0.95))
        runs.append(finished(tmp_path, recipe(seed=seed), two(), 5 + seed / 100, 0.95 if seed < 2 else 0.85))
    metrics = ["seconds_to_target", "cost_to_target"]
    document = compare.table(of_runs(runs), None, metrics, 0.9)
    column = document["cells"][1]["metrics"]["seconds_to_target"]
    assert (column["n"], column["missed"], column["median"]) == (5, 3, None)
    assert column["against_baseline"]["n"] == 5
    assert column["against_baseline"]["verdict"] == "not significant"
    json.dumps(document, allow_nan=False)


# ---------------------------------------------------------------- studies whose times come from whole runs


class Begun:
    """A study of two cells whose runs began when the test says so; each takes 10 s."""

    def __init__(self, root: Path, name: str = "mine", metrics: tuple[str, ...] = ("seconds", "accuracy")) -> None:
        cells = {"one": one(), "two": two()}
        self.items = [
            Item(cell=cell, repeat=repeat, seed=repeat, digest=f"{cell}-{repeat}")
            for repeat in range(4)
            for cell in cells
        ]
        study = Study(name=name, cells={cell: {} for cell in cells}, repeats=4, metrics=list(metrics))
        planned = [
            Cell(name=cell, recipe=recipe(), placement=where, plan=plan(recipe(), where, 1000, 100))
            for cell, where in cells.items()
        ]
        self.planned = Planned(study=study, cells=planned, items=self.items)
        self.folder = StudyFolder(root / "studies" / name)
        self.folder.write(self.planned)

    def run(self, cell: str, repeat: int, at: float, seconds: float = 10.0) -> None:
        item = next(item for item in self.items if (item.cell, item.repeat) == (cell, repeat))
        where = self.planned.cell(cell).placement
        run = finished(self.folder.runs, recipe(seed=repeat), where, seconds, 0.9 + repeat / 1000, created=at)
        write_atomic(run.folder / "status.json", {"state": "done", "since": at + 10})
        self.folder.begins(item, run.id)


def test_runs_of_one_repeat_are_a_pair_whenever_they_were_made(tmp_path: Path) -> None:
    study = Begun(tmp_path)
    for repeat in range(4):
        study.run("one", repeat, 1000.0 * repeat)
        study.run("two", repeat, DAY - 1000.0 * repeat, 5.0 + repeat / 100)
    cell = cells_of(compare.study_document(study.folder))["two"]["metrics"]
    assert cell["seconds"]["against_baseline"]["n"] == 4
    assert cell["seconds"]["against_baseline"]["effect"] == pytest.approx(0.5015, abs=1e-3)
    assert cell["accuracy"]["against_baseline"]["n"] == 4


def test_a_study_does_not_take_the_runs_of_another(tmp_path: Path) -> None:
    first, second = Begun(tmp_path), Begun(tmp_path, "again")
    for cell in ("one", "two"):
        first.run(cell, 0, 0.0)
    assert len(first.folder.runs_of(first.items)) == 2
    assert second.folder.runs_of(second.items) == {}
    assert [cell["done"] for cell in compare.study_document(second.folder)["cells"]] == [0, 0]


def test_a_metric_that_there_is_not_is_said_of_the_study(tmp_path: Path) -> None:
    study = Begun(tmp_path, metrics=("seconds", "accurccy"))
    with pytest.raises(
        Damaged, match="study mine is damaged, or of another version of Lockstep: no such metric 'accurccy'"
    ):
        compare.study_document(study.folder)


# ---------------------------------------------------------------- fairness


def notes_of(
    root: Path, a: tuple[Recipe, Placement, dict[str, Any]], b: tuple[Recipe, Placement, dict[str, Any]]
) -> str:
    return "\n".join(compare.runs_document([finished(root, x, y, **z) for x, y, z in (a, b)])["fairness"])


def test_a_fair_comparison_has_nothing_to_say(tmp_path: Path) -> None:
    document = compare.runs_document(
        [finished(tmp_path, recipe(seed=1), one(threads=2)), finished(tmp_path, recipe(seed=1), two())]
    )
    assert [note for note in document["fairness"] if "interleaved" not in note] == []


def test_the_reports_mistake_is_said_with_both_clean_designs(tmp_path: Path) -> None:
    said = notes_of(
        tmp_path, (recipe(batch_per_rank=32), one(), {}), (recipe(batch_per_rank=32, global_batch=64), two(), {})
    )
    assert "the global batch changes with the ranks (1 rank: 32, 2 ranks: 64) and the learning rate does not" in said
    assert "strong scaling, global_batch=64 in all cells" in said
    assert "weak scaling, batch_per_rank=32 with lr_rule=linear lr_batch=32" in said
    ruled = notes_of(
        tmp_path,
        (recipe(batch_per_rank=32, lr_rule="linear", lr_batch=32), one(), {}),
        (recipe(batch_per_rank=32, global_batch=64, lr_rule="linear", lr_batch=32), two(), {}),
    )
    assert "weak scaling: the global batch grows" in ruled
    assert "clean designs" not in ruled


@pytest.mark.parametrize(
    ("other", "where", "summary", "said"),
    [
        ({}, {"threads": 2}, {}, "different numbers of cores (2 in 'threads=1', 4 in 'threads=2')"),
        ({"shuffle": False}, {}, {}, "different data or in a different order"),
        ({"seed": 9}, {"pin": False}, {}, "cells have different seeds"),
        ({"epochs": 1}, {}, {"train_images": 1000}, "different numbers of samples"),
        ({}, {"pin": False}, {"test_samples": 96}, "different test sets"),
        ({}, {"pin": False}, {"ranks_agree": False}, "the exchange of 'pin=False' did nothing"),
        ({}, {"strategy": "local-sgd"}, {}, "strategy=local-sgd averages weights every 8 steps"),
        ({}, {"ddp": Ddp(hook="fp16")}, {}, "ddp.hook=fp16 compresses the gradients"),
        ({}, {"threads": 2}, {"images_per_second": 9000.0, "train_seconds": 1.0}, "more than the cores explain"),
    ],
)  # fmt: skip
def test_each_unfairness_is_found(
    tmp_path: Path, other: dict[str, Any], where: dict[str, Any], summary: dict[str, Any], said: str
) -> None:
    assert said in notes_of(tmp_path, (recipe(), two(), {}), (recipe(**other), two(**where), summary))


def test_published_claims_are_judged_by_the_runs(tmp_path: Path) -> None:
    runs = []
    for seed in range(8):
        runs.append(finished(tmp_path, recipe(seed=seed), one(), 10 + seed / 100, 0.9 + seed / 1000))
        runs.append(finished(tmp_path, recipe(seed=seed), two(), 5 + seed / 90, 0.9 + seed / 1000))
    groups = of_runs(runs)
    groups[0].name, groups[1].name = "one", "two"
    claims = [
        Claim(text="slower", metric="seconds", more="one", less="two", ratio=1.9),
        Claim(text="faster", metric="seconds", more="two", less="one", why="because"),
        Claim(text="equal", metric="accuracy", more="one", less="two", same=True),
        Claim(text="as long", metric="seconds", more="one", less="two", same=True),
    ]
    found = compare._published(Published(source="B", claims=claims), groups, None)
    assert [claim["verdict"] for claim in found["claims"]] == ["agrees", "differs", "agrees", "differs"]
    assert found["claims"][0]["ours"] == pytest.approx(2.0, abs=0.03)


def test_the_command_compares_runs(cli: Cli) -> None:
    for seed in (1, 2, 3):
        finished(cli.runs, recipe(seed=seed), one(), 10 + seed / 100)
        finished(cli.runs, recipe(seed=seed), two(), 6 + seed / 100)
    ids = sorted(path.name for path in cli.runs.iterdir())
    shown = cli("compare", *ids)
    assert shown.returncode == 0, shown.stderr
    assert "faster" in shown.stdout
    assert "1.66×" in shown.stdout
    document = json.loads(cli("compare", *ids, "--json").stdout)
    assert document["cells"][1]["speed_up"] == pytest.approx(1.664, abs=0.01)
    assert "no run 'nothing'" in cli.error("compare", "nothing", code=2)
    assert "--baseline x: no such cell" in cli.error("compare", *ids, "--baseline", "x", code=2)


# ---------------------------------------------------------------- the index


def settle(root: Path) -> None:
    """As if everything had been written a while ago: what has just changed is not remembered."""
    for path in root.iterdir():
        os.utime(path, (time.time() - 60, time.time() - 60))


def test_the_index_says_what_the_folders_say_and_notices_every_change(tmp_path: Path) -> None:
    runs = [finished(tmp_path, recipe(seed=k), one(), 10 + k) for k in range(20)]
    settle(tmp_path)
    direct = [index.line(run) for run in runs]
    assert index.rows(tmp_path) == direct == index.rows(tmp_path)
    # It is really used: a folder whose time did not change is not read again.
    summary = json.loads((runs[3].folder / "summary.json").read_text())
    before = runs[3].folder.stat().st_mtime_ns
    (runs[3].folder / "summary.json").write_text(json.dumps(summary | {"train_seconds": 99.0}))
    assert runs[3].folder.stat().st_mtime_ns == before
    assert index.rows(tmp_path)[3]["train_seconds"] == 13.0
    # Files that are replaced, as a run replaces them, are noticed; so are new runs and runs that are gone.
    write_atomic(runs[3].folder / "summary.json", summary | {"train_seconds": 55.0})
    for path in sorted(runs[5].folder.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    runs[5].folder.rmdir()
    new = finished(tmp_path, recipe(), two())
    rows = index.rows(tmp_path)
    assert rows[3]["train_seconds"] == 55.0
    assert [row["id"] for row in rows] == [run.id for run in runs if run is not runs[5]] + [new.id]
    index.forget(tmp_path)
    assert index.rows(tmp_path) == rows, "it can always be rebuilt"


def test_a_run_that_vanishes_while_runs_are_listed_hides_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was listed, and is deleted before it is looked at: the others are there."""
    runs = [finished(tmp_path, recipe(seed=k), one()) for k in range(5)]
    settle(tmp_path)
    scan = os.scandir

    @contextmanager
    def slow(root: Path) -> Iterator[list[os.DirEntry[str]]]:
        monkeypatch.setattr(index.os, "scandir", scan)
        with scan(root) as entries:
            listed = list(entries)
        shutil.rmtree(runs[2].folder)
        yield listed

    monkeypatch.setattr(index.os, "scandir", slow)
    found = index.rows(tmp_path)
    assert [row["id"] for row in found] == [run.id for run in runs if run is not runs[2]]


def test_a_run_under_way_is_read_anew_each_time(tmp_path: Path) -> None:
    run = finished(tmp_path, recipe(), one(), state="running")
    beat = {"rank": 0, "state": "running", "time": time.time() - 100}
    settle(tmp_path)
    assert index.rows(tmp_path)[0]["state"] == "running"
    write_atomic(run.rank_folder(0) / "status.json", beat)  # changes a folder below the run's
    assert index.rows(tmp_path)[0]["state"] == "stalled"
    # That was a judgement of that moment, and is not kept: the rank reports again.
    write_atomic(run.rank_folder(0) / "status.json", beat | {"time": time.time()})
    assert index.rows(tmp_path)[0]["state"] == "running"
    settle(tmp_path)
    run.write_status("stalled", cause="rank 0 gave no sign of life")
    settle(tmp_path)
    for _ in range(2):
        assert index.rows(tmp_path)[0]["state"] == "stalled", "what ended as stalled stays so"


def test_the_newest_run_is_the_one_created_last_whatever_its_name(tmp_path: Path) -> None:
    names = ("zebra", "20260101-first", "aardvark", "middle")
    for created, name in zip((1.0, 4.0, 3.0, 2.0), names, strict=True):
        made = finished(tmp_path, recipe(), one())
        made.write_spec(msgspec.structs.replace(made.spec(), id=name, created=created))
        made.folder.rename(tmp_path / name)
    assert [Run.find(name, tmp_path).id for name in ("last", "mid")] == ["20260101-first", "middle"]
    by_time = ["zebra", "middle", "aardvark", "20260101-first"]
    assert [row["id"] for row in index.rows(tmp_path)] == by_time
    # Damaged ones are in nobody's way, whatever their names are.
    for name, content in (
        ("zz-cut", "{"),
        ("zz-type", '{"created": "now"}'),
        ("zz-deep", "[" * 100_000),
        ("zz-none", ""),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(content)
    (tmp_path / "zz-folder" / "run.json").mkdir(parents=True)
    (tmp_path / "zz-pipe").mkdir()
    os.mkfifo(tmp_path / "zz-pipe" / "run.json")
    assert Run.find("last", tmp_path).id == "20260101-first"


def test_a_damaged_index_and_one_that_cannot_be_written_cost_only_time(tmp_path: Path) -> None:
    run = finished(tmp_path, recipe(), one())
    settle(tmp_path)
    (tmp_path / index.NAME).write_bytes(b"not a database at all" * 100)
    assert [row["id"] for row in index.rows(tmp_path)] == [run.id]
    assert [row["id"] for row in index.rows(tmp_path)] == [run.id]
    index.forget(tmp_path)
    (tmp_path / index.NAME).mkdir()  # cannot be opened, even by root
    assert [row["id"] for row in index.rows(tmp_path)] == [run.id]


def test_any_flipped_byte_of_the_index_costs_only_time(tmp_path: Path) -> None:
    """Every 3rd byte of the header and every 89th of the rest, one at a time: what is listed is always what the folders say."""
    for k in range(25):
        finished(tmp_path, recipe(seed=k), one(), 10 + k)
    settle(tmp_path)
    expected = index.rows(tmp_path)
    whole = (tmp_path / index.NAME).read_bytes()
    rebuilt = 0
    for place in [*range(0, 100, 3), *range(100, len(whole), 89)]:
        damaged = bytearray(whole)
        damaged[place] ^= 0xFF
        index.forget(tmp_path)
        (tmp_path / index.NAME).write_bytes(damaged)
        assert index.rows(tmp_path) == expected, f"byte {place} of {len(whole)}"
        assert index.rows(tmp_path) == expected, f"byte {place} of {len(whole)}, the second time"
        rebuilt += (tmp_path / index.NAME).read_bytes() != bytes(damaged)
    assert rebuilt > 20, "damage was noticed and mended"
    for name in (f"{index.NAME}-journal", f"{index.NAME}-wal"):
        (tmp_path / name).write_bytes(b"not what it should be" * 200)
        assert index.rows(tmp_path) == expected, name


def test_two_processes_may_use_it_at_once(tmp_path: Path) -> None:
    for k in range(60):
        finished(tmp_path, recipe(seed=k), one())
    settle(tmp_path)
    code = (
        "import sys, pathlib\nfrom lockstep import index\nroot = pathlib.Path(sys.argv[1])\n"
        "for k in range(15):\n    if k % 5 == 4: index.forget(root)\n    assert len(index.rows(root)) == 60\n"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stderr=subprocess.PIPE) for _ in range(3)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors.decode()
