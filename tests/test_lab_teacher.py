"""Labs as a teacher meets them: which lab grades a hand-in, labs that cannot be graded, clocks that were set back, and a grading that is stopped."""

from __future__ import annotations

import csv
import json
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import lab_solver
import lab_submissions as wrong
from lockstep.errors import InputError
from lockstep.lab import chain, definition
from lockstep.lab.chain import Chain
from lockstep.lab.definition import BUILTIN
from lockstep.lab.folder import LabFolder, make
from lockstep.lab.hand_in import hand_in
from lockstep.lab.inspect import inspect
from lockstep.run import Run
from support import Cli, wait_for

OTHER_LAB = "was made from another lab.toml"


def copied(folder: Path, changed: bool) -> Path:
    """A built-in lab as a teacher's own folder, under its old name."""
    shutil.copytree(BUILTIN / "devices", folder)
    path = folder / "lab.toml"
    path.write_text(path.read_text() + "# for my class\n" * changed)
    return folder


def test_a_changed_copy_of_a_lab_is_not_graded_by_lockstep_in_silence(cli: Cli) -> None:
    own = copied(cli.folder / "labs/devices", changed=True)
    hand_in(make(str(own), cli.folder / "ana", "Ana Li"), cli.folder / "ana.lab.zip")
    hand_in(make("devices", cli.folder / "bob", "Bob"), cli.folder / "bob.lab.zip")
    assert OTHER_LAB in " ".join(cli("lab", "check", "ana.lab.zip").stdout.split())
    assert OTHER_LAB in " ".join(cli("lab", "check", "ana").stdout.split())
    assert OTHER_LAB not in cli("lab", "check", "ana.lab.zip", "--lab", "labs/devices").stdout
    assert OTHER_LAB not in cli("lab", "check", "bob.lab.zip").stdout
    assert OTHER_LAB in " ".join(cli("lab", "check", "bob.lab.zip", "--lab", "labs/devices").stdout.split())


@pytest.mark.parametrize("changed", [True, False])
def test_a_name_that_means_two_labs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: bool) -> None:
    monkeypatch.chdir(tmp_path)
    copied(tmp_path / "devices", changed)
    assert definition.find("./devices") == Path("devices")
    if not changed:
        assert definition.find("devices") == BUILTIN / "devices"
        return
    with pytest.raises(InputError, match=r"say \./devices for the folder, or type this elsewhere for Lockstep's"):
        definition.find("devices")


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("model=nets.py:Net", "one: model=nets.py:Net names a file"),
        ("model=nets:Net", "one: model=nets:Net names a file"),
        ("metrics=accuracy,nets.py:top2", "one: metrics=nets.py:top2 names a file"),
        ("model=torchvision.models:resnet18", None),
    ],
)
def test_a_lab_whose_runs_need_the_teachers_file_is_refused(tmp_path: Path, word: str, named: str | None) -> None:
    (tmp_path / "nets.py").write_text("")
    (tmp_path / "lab.toml").write_text(wrong.LAB.replace('words = "ranks=1"', f'words = "ranks=1 {word}"'))
    if named is None:
        assert definition.read(tmp_path).name == "mini"
        return
    with pytest.raises(InputError, match="which grading does not have") as error:
        definition.read(tmp_path)
    assert named in str(error.value)


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


HANGS = """
import time
from pathlib import Path

Path({marker!r}).touch()
time.sleep(1000)
"""


@pytest.mark.cold
def test_ctrl_c_keeps_what_is_graded_so_far(cli: Cli) -> None:
    wrong.write_labs(cli.folder / "labs")
    marker = cli.folder / "begun"
    made = make(str(cli.folder / "labs/ring"), cli.folder / "ben", "Ben")
    hand_in(made, cli.folder / "ana.lab.zip", "Ana Li")
    (made.path / "ring.py").write_text(HANGS.format(marker=str(marker)))
    for name in ("ben", "cem"):
        hand_in(LabFolder(made.path), cli.folder / f"{name}.lab.zip", name)
    files = [f"{name}.lab.zip" for name in ("ana", "ben", "cem")]
    process = cli.start("lab", "check", "--lab", "labs/ring", *files, "-o", "grades")
    wait_for(marker.exists, seconds=60, what="the second hand-in to be graded")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert errors.splitlines()[-1] == (
        "lockstep: lab check: stopped: 2 of 3 hand-ins are not graded: 'ben.lab.zip', 'cem.lab.zip'"
    )
    with (cli.folder / "grades/class.csv").open() as file:
        assert [row["file"] for row in csv.DictReader(file)] == ["ana.lab.zip"]
    assert (cli.folder / "grades/Ana-Li/results.json").is_file()
    again = cli.start("lab", "check", "--lab", "labs/ring", "ben.lab.zip", "-o", "none")
    marker.unlink()
    wait_for(marker.exists, seconds=60, what="a single hand-in to be graded")
    again.send_signal(signal.SIGINT)
    _, errors = again.communicate(timeout=60)
    assert again.returncode == 130, errors
    assert "1 of 1 hand-in is not graded" in errors
    assert not (cli.folder / "none").exists()
