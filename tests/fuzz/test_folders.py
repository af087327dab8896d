"""Damaged run and study folders, through every view. What cannot be read is named and left out; nothing breaks, nothing hangs."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import folders
import pytest
from harness import answer, command, count, examples
from hypothesis import given
from hypothesis import strategies as st

from lockstep.dashboard.listing import Listing, Query
from lockstep.dashboard.live import LiveRun
from lockstep.dashboard.maker import Asked, make
from lockstep.run import Run

SEEDS = st.integers(0, 2**32)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of two cells with two runs each, and a run that failed: 5 run folders."""
    root = tmp_path_factory.mktemp("whole") / "runs"
    folders.study_folder(root)
    folders.run_folder(root, "failed", "two", state="failed")
    return root


def views(root: Path, run: str, out: Path) -> None:
    """The ways in which people look at runs and studies."""
    runs = ("--runs", str(root))
    command("runs", *runs)
    command("show", run, "--ranks", "--plot", *runs)
    command("compare", run, "failed", *runs)
    command("explain", run, *runs)
    command("report", run, "failed", "-o", str(out / "report.md"), *runs)
    command("study", "list", *runs)
    command("study", "show", "mine", "--plot", *runs)


def rare_views(root: Path, run: str, out: Path) -> None:
    runs = ("--runs", str(root))
    command("runs", "--all", "--json", *runs)
    command("show", run, "--json", *runs)
    command("show", run, "--operators", *runs)
    command("compare", run, "failed", "--json", *runs)
    command("compare", "mine", *runs)
    command("explain", "mine", "--json", *runs)
    command("predict", run, "--ranks", "2,4", *runs)
    command("report", "mine", "-o", str(out / "report.json"), *runs)
    command("export", run, "failed", "-o", str(out / "t.csv"), *runs)
    command("export", run, "--what", "epochs", "-o", str(out / "t.json"), *runs)
    command("export", run, "--what", "steps", "-o", str(out / "t.csv"), *runs)
    command("export", run, "--format", "tensorboard", "-o", str(out / "tb"), *runs)
    command("export", run, "--format", "perfetto", "-o", str(out / "p.json"), *runs)
    command("export", run, "--format", "hta", "-o", str(out / "hta"), *runs)
    command("study", "show", "mine", "--json", *runs)
    command("run", "--resume", run, "--dry-run", *runs)
    listing = Listing(root)
    answer(lambda: listing.view(Query()))
    answer(lambda: make(Asked(runs=[str(root / run)])))
    answer(lambda: make(Asked(study=str(root / "studies" / "mine"))))
    answer(lambda: LiveRun(root, Run(root / run), Run(root / run).spec(), 0).look())


@examples("run folders")
@given(seed=SEEDS)
def test_damaged_run_folders(seed: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    root = copied(whole, tmp_path, monkeypatch)
    run = rng.choice(sorted(path for path in root.glob("study-*")))
    damage_some(rng, run)
    look(rng, "run folders", root, run.name, tmp_path)


@examples("study folders")
@given(seed=SEEDS)
def test_damaged_study_folders(seed: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    root = copied(whole, tmp_path, monkeypatch)
    damage_some(rng, root / "studies")
    if rng.random() < 0.1:
        (root / "studies" / os.fsdecode(b"not \xff text")).mkdir()
        (root / "studies" / os.fsdecode(b"not \xff text") / "study.json").write_text("{}")
    look(rng, "study folders", root, "failed", tmp_path)


def copied(whole: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = place / "runs"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    shutil.copytree(whole, root)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    monkeypatch.chdir(place)
    return root


def damage_some(rng: random.Random, folder: Path) -> None:
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        there = folders.files(folder)
        if there:
            rng.choice(folders.DAMAGES)(rng.choice(there), rng)


def look(rng: random.Random, target: str, root: Path, run: str, out: Path) -> None:
    count(target)
    (rare_views if rng.random() < 0.4 else views)(root, run, out)
