"""What the dashboard reads: files that are still being written, long runs, the list; and which process it would stop."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from lockstep.dashboard import stopping
from lockstep.dashboard.documents import Documents
from lockstep.dashboard.listing import PAGE, Listing, Query
from lockstep.dashboard.live import LIVE_PLOTS, LiveRun
from lockstep.dashboard.maker import Asked, _subject, make
from lockstep.dashboard.security import Refused
from lockstep.dashboard.steps import LiveSteps
from lockstep.dashboard.tail import TAIL_BYTES, Text
from lockstep.explain.evidence import PEERS_EACH_WAY
from lockstep.measure.phases import NAMES
from lockstep.measure.records import ROW
from lockstep.report import along
from lockstep.report.curves import MOST_POINTS, step_series
from lockstep.report.document import report
from lockstep.report.subject import of_runs
from lockstep.run import Run, write_atomic
from lockstep.ways import BESIDE, FILE, Way
from test_report import ALONE, RECIPE, Folders, isolated, step_rows, study_folder


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folders:
    return isolated(tmp_path, monkeypatch)


def test_what_is_measured_again_is_shown_again(folders: Folders) -> None:
    run = folders.run("one")
    documents, beside = Documents(Listing(folders.root)), Run(run.folder / BESIDE)
    beside.folder.mkdir(parents=True)

    def measured(seconds: float) -> bytes:
        parts = dict.fromkeys((*NAMES, "total"), 0.0)
        ways = [
            Way(name=name, samples=32, ranks=2, threads=1, steps=5, rounds=[[seconds] * 2] * 5, phases=[parts] * 2)
            for name in ("whole", "plain", "apart", "together", "no-data")
        ]
        write_atomic(beside.folder / FILE, {"ways": msgspec.to_builtins(ways)})
        beside.write_status("done")
        return documents.of_runs(["one"]).body

    first = measured(0.123)
    assert b"123 ms" in first
    assert b"456 ms" in measured(0.456)


# ---------------------------------------------------------------- steps


def reserve(run: Run, ranks: int, rows: int) -> None:
    """As a rank does at its start: the whole file, empty."""
    for rank in range(ranks):
        (run.rank_folder(rank) / "steps.bin").write_bytes(bytes(rows * ROW.itemsize))


def write(run: Run, rank: int, rows: np.ndarray[Any, Any], more: int = 0) -> None:
    """Rows at the beginning of the reserved file; `more` bytes of a row that is being written."""
    with (run.rank_folder(rank) / "steps.bin").open("r+b") as file:
        file.write(rows.tobytes() + b"\1" * more)


def live(run: Run) -> LiveSteps:
    return LiveSteps(run.folder.parent, run, run.spec().plan, on_gpu=False)


def loss_line(found: LiveSteps) -> Any:
    return next(chart for chart in found.charts() if chart.id == "loss-by-step").series[0]  # type: ignore[union-attr]


def test_steps_are_followed_while_they_are_written_and_only_those_that_all_ranks_have(folders: Folders) -> None:
    run = folders.run("one", state="running")
    reserve(run, 2, 1000)
    rows = [step_rows(280, rank) for rank in (0, 1)]
    rows[1]["loss_sum"] *= 3
    found = live(run)
    assert not found.look()
    assert found.charts() == []
    expected = np.mean([each["loss_sum"] for each in rows], axis=0) / 32
    for mine, other in ((5, 3), (120, 200), (280, 279), (280, 280)):
        write(run, 0, rows[0][:mine])
        write(run, 1, rows[1][:other], more=0 if other == 280 else 3)
        assert found.look()
        line = loss_line(found)
        both = min(mine, other)
        assert line.x == list(range(1, both + 1))
        assert line.y == pytest.approx(expected[:both], rel=1e-5)
        assert not found.look(), "nothing has been written since"


def test_a_long_run_is_shown_in_a_few_hundred_stretches(folders: Folders) -> None:
    run = folders.run("one", state="running")
    count = 100_003
    rows = [step_rows(count, rank) for rank in (0, 1)]
    for each in rows:
        each["loss_sum"] = 32 * np.random.default_rng(5).random(count)
    reserve(run, 2, count)
    found = live(run)
    for upto in (70, 1_500, 33_333, count):  # not at the ends of stretches
        for rank in (0, 1):
            write(run, rank, rows[rank][:upto])
        while found.look():
            pass
    losses = rows[0]["loss_sum"] / 32
    way = along.of_steps(
        rows[0]["step"], np.full(count, 64), along.seconds_of(rows[0]), run.spec().plan.steps_per_epoch
    )
    expected = step_series(way, losses, "loss", "c0")
    line = loss_line(found)
    assert len(line.y) == MOST_POINTS
    assert msgspec.to_builtins(line) == msgspec.to_builtins(expected)


def test_ranks_that_were_restarted_are_read_from_the_start(folders: Folders) -> None:
    run = folders.run("one", state="running")
    found = live(run)
    found.look()
    assert len(loss_line(found).x) == 40
    reserve(run, 2, 1000)  # started anew, from another checkpoint
    rows = step_rows(25, start_ns=9_000_000_000)
    rows["loss_sum"] = 64.0
    for rank in (0, 1):
        write(run, rank, rows)
    assert found.look()
    assert loss_line(found).y == pytest.approx([2.0] * 25)


def test_live_plots_are_those_of_the_report(folders: Folders) -> None:
    run = folders.run("one", state="running")
    events = LiveRun(folders.root, run, run.spec()).look()
    ours = {chart.id: chart for name, chart in events if name == "plot"}
    charts = report([of_runs([run])]).parts[0].charts
    theirs = {chart.id: chart for chart in charts if chart.id in LIVE_PLOTS or chart.section == "learning"}
    assert set(ours) == set(theirs) == {*LIVE_PLOTS, "accuracy", "loss"}
    for name in ("accuracy", "loss", "loss-by-step", "rate"):
        assert msgspec.to_builtins(ours[name].series) == msgspec.to_builtins(theirs[name].series)
    assert [bar.name for bar in ours["step"].rows] == ["all ranks, mean", "rank 0", "rank 1"]
    for bar, other in zip(ours["step"].rows, theirs["step"].rows, strict=True):
        assert bar.values == pytest.approx(other.values, rel=1e-5)
    left = [chart.id for chart in make(Asked(runs=[str(run.folder)], live=True)).parts[0].charts]
    assert left
    assert not set(left) & set(ours), "what is drawn live is not in the report as well"


def test_a_run_among_many_is_explained_beside_those_of_its_time(folders: Folders) -> None:
    for number in range(2 * PEERS_EACH_WAY + 9):
        folders.run(f"run-{number:03d}", msgspec.structs.replace(RECIPE, seed=number), count=1)
    folders.run("run-004-other", msgspec.structs.replace(RECIPE, seed=4, model="cifar-vgg"), count=1)
    folders.run("run-005-failed", msgspec.structs.replace(RECIPE, seed=5), state="failed", count=1)
    found = _subject(Asked(runs=[str(folders.root / "run-006")]))
    expected = [f"run-{number:03d}" for number in range(6 + PEERS_EACH_WAY + 1) if number != 6]
    assert [run.id for run in found.peers] == ["run-006", *expected]
    alone = make(Asked(runs=[str(folders.root / "run-005-failed")]))
    assert alone.parts[0].findings[0].findings[0].verdict == "failed: rank 1: MemoryError"


# ---------------------------------------------------------------- lines and logs


def test_epochs_are_drawn_as_whole_lines_and_again_when_they_have_changed(folders: Folders) -> None:
    run = folders.run("one", state="running")
    path = run.folder / "epochs.jsonl"
    found = LiveRun(folders.root, run, run.spec())

    def epochs() -> list[float] | None:
        drawn = {chart.id: chart for name, chart in found.look() if name == "plot"}
        return drawn["loss"].series[0].x if "loss" in drawn else None

    path.write_text('{"epoch": 1, "test_loss": 2}\n{"epoch": 2, "tes')
    assert epochs() == [1]
    assert epochs() is None, "nothing has been written since"
    with path.open("a") as file:
        file.write('t_loss": 1}\n{"epoch": 3, "test_loss": 1}\n')
    assert epochs() == [1, 2, 3]
    path.write_text('{"epoch": 9, "test_loss": 0}\n')
    assert epochs() == [9], "another file by the same name"
    path.write_text("not json\n")
    assert epochs() is None, "the run is damaged now"


def test_the_end_of_a_log_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    text = Text(tmp_path, path)
    assert text.look() is None
    path.write_bytes(b"one\n" + "zwölf\n".encode()[:3])
    assert text.look() == ("one\nzw", True), "half of a letter waits for the other half"
    with path.open("ab") as file:
        file.write("zwölf\n".encode()[3:])
    assert text.look() == ("ölf\n", False)
    assert text.look() is None
    with path.open("ab") as file:
        file.writelines(b"line %06d\n" % number for number in range(20_000))
    found = text.look()
    assert found is not None
    assert found[1], "too much to send: from its end again"
    assert found[0].splitlines()[-1] == "line 019999"
    assert len(found[0]) <= TAIL_BYTES
    assert found[0].startswith("line "), "not from the middle of a line"
    path.write_text("anew\n")
    assert text.look() == ("anew\n", True)


# ---------------------------------------------------------------- the list


def test_the_list_is_filtered_sorted_and_cut_into_pages(folders: Folders) -> None:
    for number in range(PAGE + 7):
        recipe = msgspec.structs.replace(RECIPE, seed=number)
        seconds = float((number * 37) % 101 + 1)
        folders.run(
            f"run-{number:02d}", recipe, ALONE, seconds, state="failed" if number % 10 == 3 else "done", count=1
        )
    listing = Listing(folders.root)
    everything = listing.view(Query())
    assert [row["id"] for row in everything["rows"]] == [f"run-{n:02d}" for n in range(PAGE + 6, 6, -1)], "newest first"
    assert (everything["found"], everything["pages"], everything["counts"]) == (57, 2, {"done": 51, "failed": 6})
    last = listing.view(Query(page=99))
    assert (last["page"], len(last["rows"])) == (2, 7)
    fast = listing.view(Query(sort="train_seconds", down=False))["rows"]
    known = sorted(float((n * 37) % 101 + 1) for n in range(57) if n % 10 != 3)
    assert [row["train_seconds"] for row in fast] == known[:PAGE]
    slow = listing.view(Query(sort="train_seconds", down=True, page=2))["rows"]
    assert [row["train_seconds"] for row in slow][-6:] == [None] * 6, "those without a time come last, both ways"
    failed = listing.view(Query(state="failed"))
    assert {row["id"] for row in failed["rows"]} == {f"run-{n}3" for n in range(6)}
    assert [row["id"] for row in listing.view(Query.of({"words": "EMBEDDED un-4"}))["rows"]][-1] == "run-40"
    for bad in ({"sort": "__class__"}, {"page": "0"}, {"page": "-1"}, {"page": "x"}, {"page": "²"}):
        with pytest.raises(Refused):
            Query.of(bad)


def test_a_study_says_how_far_it_is(folders: Folders) -> None:
    study_folder(folders, {"one": (RECIPE, ALONE), "two": (RECIPE, ALONE)}, 2)
    runs = sorted(path for path in folders.root.iterdir() if path.name.startswith("run-"))
    Run(runs[0]).write_status("failed", cause="x")
    Run(runs[1]).write_status("running", supervisor_pid=os.getpid(), host=platform.node())
    (line,) = Listing(folders.root).studies()
    assert {key: line[key] for key in ("name", "cells", "planned", "done", "failed", "active")} == {
        "name": "mine",
        "cells": 2,
        "planned": 4,
        "done": 2,
        "failed": 1,
        "active": 1,
    }
    (folders.root / "studies" / "mine" / "study.json").write_text("{")
    assert Listing(folders.root).studies()[0]["about"] == "study.json cannot be read"


def test_a_run_under_way_shows_its_last_sign_of_life(folders: Folders) -> None:
    run = folders.run("one", state="running")
    now = time.time()
    for rank, when in ((0, now - 3), (1, now - 1)):
        beat = {"rank": rank, "state": "running", "time": when, "step": 7, "epoch": 1}
        (run.rank_folder(rank) / "status.json").write_text(json.dumps(beat))
    (row,) = Listing(folders.root).view(Query())["rows"]
    assert (row["state"], row["sign"], row["step"]) == ("running", now - 1, 7)
    assert row["steps"] == run.spec().plan.total_steps


# ---------------------------------------------------------------- stopping

START = "import signal, subprocess, sys, time\nchild = None\n"
CATCHES = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
HAS_RANKS = "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)', sys.argv[1]])\n"


@contextmanager
def process(code: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A process that may have a child, as a launcher has; both are gone at the end."""
    code = START + code + "print(child.pid if child else 0, flush=True)\ntime.sleep(60)"
    started = subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    child = int(started.stdout.readline())
    try:
        yield started
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
        started.kill()
        started.communicate()


def watched_by(run: Run, pid: int, **more: Any) -> Run:
    run.write_status("running", **{"supervisor_pid": pid, "host": platform.node(), **more})
    return run


def created_now(run: Run) -> Run:
    spec = msgspec.structs.replace(run.spec(), created=time.time())
    run.write_spec(spec)
    return run


def test_only_the_process_that_started_the_run_is_stopped(folders: Folders) -> None:
    run = folders.run("one", state="running")
    with process(CATCHES + HAS_RANKS, str(run.folder)) as parent:
        watched_by(created_now(run), parent.pid)
        assert stopping.watcher(run).pid == parent.pid
        # The same pid, of a process that began after the run: the pid has been given to another.
        run.write_spec(msgspec.structs.replace(run.spec(), created=time.time() - 3600))
        with pytest.raises(stopping.CannotStop, match="not the one"):
            stopping.stop(run)
        assert parent.poll() is None
        created_now(run)
        assert stopping.stop(run).pid == parent.pid
        assert parent.wait(10) == 7


@pytest.mark.parametrize(("code", "why"), [(CATCHES, "not the one"), (HAS_RANKS, "does not listen")])
def test_a_process_that_may_be_another_is_left_alone(folders: Folders, code: str, why: str) -> None:
    run = folders.run("one", state="running")
    with process(code, str(run.folder)) as other:
        watched_by(created_now(run), other.pid)
        with pytest.raises(stopping.CannotStop, match=why):
            stopping.stop(run)
        assert other.poll() is None


def test_what_cannot_be_stopped_from_here_says_why(folders: Folders) -> None:
    run = folders.run("one", state="done")
    with pytest.raises(stopping.CannotStop, match="not under way: done"):
        stopping.stop(run)
    watched_by(run, os.getpid(), host="elsewhere")
    with pytest.raises(stopping.CannotStop, match="on host elsewhere"):
        stopping.stop(run)
    run.write_status("running", host=platform.node(), job="123")
    with pytest.raises(stopping.CannotStop, match="scancel 123"):
        stopping.stop(run)
    run.write_status("running")
    with pytest.raises(stopping.CannotStop, match="does not say"):
        stopping.stop(run)
