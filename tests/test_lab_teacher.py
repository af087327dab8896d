"""Labs as a teacher meets them: which lab grades a hand-in, labs that cannot be graded, clocks that were set back, and a grading that is stopped."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import lab_solver
import lab_submissions as wrong
from lockstep.lab import chain
from lockstep.lab.chain import Chain
from lockstep.lab.folder import make
from lockstep.lab.inspect import inspect
from lockstep.run import Run
from support import Cli


def test_a_ledger_is_whole_after_a_clock_was_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([5000.0, 1400.0, 1500.0, 6000.0])
    monkeypatch.setattr(chain, "time", SimpleNamespace(time=lambda: next(clock)))
    made = Chain([])
    for kind in ("lab", "prediction", "start", "run"):
        made.append(tmp_path / "ledger.jsonl", kind)
    assert [record.time for record in made.records] == [5000.0, 5000.0, 5000.0, 6000.0]
    assert Chain.read(tmp_path / "ledger.jsonl").problems() == []


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    """`ana`: the folder of a lab of one run, begun on a machine whose clock was an hour ahead, then measured and handed in."""
    cli = Cli(tmp_path_factory.mktemp("lab"))
    (cli.folder / "lab").mkdir()
    (cli.folder / "lab/lab.toml").write_text(wrong.of_one_run())
    now = time.time()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chain, "time", SimpleNamespace(time=lambda: now + 3600))
        made = make(str(cli.folder / "lab"), cli.folder / "ana", "Ana Li")
        made.predict({"speedup": 1.5})
    lab_solver.measure(cli, "ana")
    lab_solver.answer(cli, "ana", str(cli.folder / "lab"))
    lab_solver.hand_in(cli, "ana")
    return cli


def test_a_run_after_a_clock_was_set_back_is_right(desk: Cli) -> None:
    result = desk("lab", "check", "--lab", "lab", "ana.lab.zip")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "30 of 30 points" in result.stdout


def test_a_clock_that_was_set_back_during_a_run_is_not_held_against_it(desk: Cli) -> None:
    shutil.copytree(desk.folder / "ana/runs/one-1", desk.folder / "set-back/one-1")
    path = desk.folder / "set-back/one-1/epochs.jsonl"
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    second["time"] = first["time"] - 3600
    path.write_text(f"{json.dumps(first)}\n{json.dumps(second)}\n")
    assert inspect("one", Run(path.parent)).problems == []


def test_a_run_that_was_removed_is_missing(desk: Cli) -> None:
    shutil.copytree(desk.folder / "ana", desk.folder / "removed")
    shutil.rmtree(desk.folder / "removed/runs/one-1")
    status = desk("lab", "status", "--folder", "removed")
    assert status.returncode == 0, status.stderr
    assert "missing; run it again" in status.stdout
    assert "not measured yet" in status.stdout
    handed = desk("lab", "hand-in", "--folder", "removed", "-o", "removed.lab.zip")
    assert handed.returncode == 0, handed.stderr
    assert "there is nothing for task 'one'" in handed.stderr
