"""What people see in windows of 80, 100 and 120 columns: commands in a real terminal, whose lines fit and whose words are whole."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shlex
import shutil
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from command_lines import next_ones, refused
from lockstep.cli.commands import COMMANDS as LOCKSTEP
from lockstep.cli.commands import call
from lockstep.recipe import Optimizer, Recipe
from lockstep.turns.folder import RaceFolder
from support import Cli
from test_race_report import made_up, raced
from test_report import ALONE, BOTH, RECIPE, Folders, study_folder

IDS = ("20260101-120000-mnist-convnet-single-1r-a1b2", "20260101-120100-mnist-convnet-spawn-2r-c3d4")
# As those of a study with long names of cells: 70 characters.
LONG = "20260101-120200-batch-size-of-many-words-batch-per-rank-128-7f0a71e8f7"
OTHER = Recipe(
    data="mnist",
    global_batch=96,
    epochs=3,
    seed=7,
    train_limit=6400,
    fused=False,
    precision="bf16",
    optimizer=Optimizer(name="sgd", lr=0.1, momentum=0.9, weight_decay=5e-4),
)
STUDY = {
    "optimizer.name=sgd, global_batch=1024": (RECIPE, ALONE),
    "optimizer.name=sgd, global_batch=1024, ranks=2": (RECIPE, BOTH),
}
PLANNED = """
about = "A plan."
repeats = 3
budget_minutes = 10
[recipe]
data = "embedded"
epochs = 1
[factors]
ranks = [1, 2]
global_batch = [32, 64]
"""
RACE = {"ranks=1 threads=2": 1.0, "ranks=2 backend=gloo strategy=ddp": 0.9, "ranks=2 backend=shm": 0.6}
COMMANDS = (
    "runs",
    f"show {IDS[1]} --ranks --no-plot",
    f"compare {IDS[0]} {IDS[1]}",
    "study show mine --no-plot",
    "study list",
    "runs --each",
    "runs state=done",
    f"show {LONG} --no-plot",
    f"explain {LONG}",
    f"compare {IDS[0]} {LONG}",
    "recipes",
    f"explain {IDS[1]}",
    "data list",
    "race",
    "study run planned.toml --dry-run",
)
# What has no table.
PLAN = "run data=embedded fused=false threads=1 ranks=2 micro_batch=16 optimizer.momentum=0.9 --dry-run --name planned"
# An error is folded as any other text.
WRONG = "show a-run-that-is-not-there --runs a/folder/that/is/not/there/either/and/has/a/long/name"
COPIED = r"^ *(next: )?lockstep |^\S+$"
# Of an example, what is said of it stands below where it does not fit beside it.
COPIED_FROM_HELP = r"^ *lockstep \S+( \S+)*$"
COPIED_FROM_A_PLAN = rf"{COPIED}|^# run folder: | -m lockstep\."
HELPED = ("", *LOCKSTEP, "study run", "study pack", "study unpack", "kernels bench", "lab check")
# One interpreter calls them all, as the command line does: starting it is what takes the time. A race is drawn from its folder, as at its end.
CALLS = """
import sys
from lockstep.cli.commands import call
from lockstep.cli.output import next_step
from lockstep.report.race import next_step as next_of_race, race_part
from lockstep.report.terminal import console, draw
from lockstep.turns.folder import RaceFolder
for words in sys.argv[1:]:
    if words == "race":
        race = RaceFolder.find("a-race", None)
        draw(race_part(race.read(), race.windows(), "a-race"), console())
        next_step(next_of_race(race.read(), race.windows()))
    else:
        call(words.split())
    print("@end", flush=True)
"""


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    made = Cli(tmp_path_factory.mktemp("widths"))
    folders = Folders(made.runs)
    folders.run(IDS[0], placement=ALONE)
    folders.run(IDS[1], placement=BOTH, seconds=6.25)
    folders.run(LONG, OTHER, BOTH)
    study_folder(folders, STUDY, 3)
    race = RaceFolder.create(made.runs, "a-race")
    windows = made_up(RACE)
    race.keep(windows)
    race.write(raced(windows, list(RACE)))
    (made.folder / "planned.toml").write_text(PLANNED)
    return made


def in_a_terminal(cli: Cli, width: int) -> dict[str, str]:
    """What each command writes to a terminal of this width, without its colours."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    given = {key: value for key, value in cli.environment.items() if key not in ("COLUMNS", "LINES")}
    commands = (*COMMANDS, PLAN, WRONG, *(f"{command} --help" for command in HELPED))
    argv = [sys.executable, "-c", CALLS, *commands]
    program = subprocess.Popen(argv, stdin=slave, stdout=slave, stderr=slave, env=given, cwd=cli.folder)
    os.close(slave)
    written = b""
    while True:
        try:
            written += os.read(master, 65536)
        except OSError:  # so Linux says that the last writer is gone
            break
    os.close(master)
    assert program.wait() == 0
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written.decode()).replace("\r\n", "\n")
    return dict(zip(commands, text.split("@end\n")[:-1], strict=True))


@pytest.fixture(scope="module")
def unfolded(cli: Cli) -> dict[str, str]:
    return in_a_terminal(cli, 1000)


def words(text: str) -> set[str]:
    """Names, ids and words; not numbers, which are written as they come."""
    return {word.rstrip(".") for word in re.findall(r"[\w.=/-]+", text) if re.search("[a-z]{3}", word)}


@pytest.mark.parametrize(
    ("command", "next_"),
    [
        (f"export {IDS[0]} last -o runs.csv", f"lockstep report {IDS[0]} last (the same as a page)"),
        ("report last -o out.md", "lockstep report last (the same as a page)"),
        (f"report {IDS[0]} last --format csv -o tables", f"lockstep report {IDS[0]} last (the same as a page)"),
        (f"runs {IDS[0]} --untag nothing", "lockstep runs (lists what is there)"),
        ("export last --format tensorboard -o board", "tensorboard --logdir board"),
        ("export last --format tensorboard -o 'a board; mine'", "tensorboard --logdir 'a board; mine'"),
        (f"follow {IDS[1]}", f"lockstep report {IDS[1]} (curves and timeline as a page)"),
        ("comms --capabilities --ranks 3", "lockstep comms --ranks 3 --quick (what each of them costs)"),
    ],
)
def test_what_to_type_next_comes_last(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, next_: str
) -> None:
    monkeypatch.setattr("lockstep.comms.capabilities.try_all", lambda *_: [])  # of which each takes seconds
    monkeypatch.setenv("LOCKSTEP_RUNS", str(cli.runs))
    monkeypatch.chdir(cli.folder)
    assert call(shlex.split(command)) == 0
    said = capsys.readouterr().err
    assert said.splitlines()[-1].removeprefix("next:").strip() == next_
    assert not [why for line in next_ones(said) if (why := refused(line))]


def test_what_to_type_next_is_accepted(cli: Cli, unfolded: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(cli.folder)
    found = {name: next_ones(unfolded[name]) for name in (*COMMANDS, PLAN)}
    assert {name: why for name, lines in found.items() for line in lines if (why := refused(line))} == {}
    assert sum(map(bool, found.values())) > len(COMMANDS) / 2, "most end with commands of ours"


@pytest.mark.parametrize("width", [80, 100, 120])
def test_tables_fit_the_window_and_break_no_word(cli: Cli, unfolded: dict[str, str], width: int) -> None:
    for name, text in in_a_terminal(cli, width).items():
        lines = text.splitlines()
        # What is to be copied stays whole: commands, and paths.
        whole = COPIED_FROM_A_PLAN if name == PLAN else COPIED_FROM_HELP if name.endswith("--help") else COPIED
        wide = [line for line in lines if len(line) > width and not re.search(whole, line)]
        assert not wide, f"{name} at {width} columns"
        assert words(text) <= words(unfolded[name] + "Left out at columns"), f"{name}: a word was broken"
        assert not (name.endswith("--help") and re.search(r"[a-z]\.\.\.$", text, re.MULTILINE)), f"{name} is cut"
        if name not in COMMANDS:
            continue
        assert "─" in text, f"{name}: a table"
        assert any(line.startswith("next: ") for line in lines[-4:]), f"{name} ends with what to type next"
    assert all(each in unfolded["runs"] for each in (*IDS, LONG))


def test_beside_other_names_last_is_a_run(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCKSTEP_RUNS", str(cli.runs))
    for words, cells in ((["last", "last~1"], 2), (["last"], len(STUDY))):
        assert call(["compare", *words, "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)["cells"]) == cells


def test_a_study_is_listed_once(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shutil.copytree(cli.runs / "studies" / "mine", tmp_path / "studies" / "batch-size")
    monkeypatch.setenv("LOCKSTEP_RUNS", str(tmp_path))
    assert call(["study", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (place,) = [place for place, line in enumerate(lines) if line.startswith("batch-size ")]
    assert "B, C" in lines[place]
    assert lines[place + 1].startswith("0/6 done"), "how far it has come here"
    assert not any("C, C" in line or "B, B" in line for line in lines)


def test_figures_stand_below_ids_that_fill_the_window(cli: Cli) -> None:
    lines = in_a_terminal(cli, 80)["runs --each"].splitlines()
    below = lines[lines.index(LONG) + 1]
    assert below.startswith("done, ranks 2, batch 96, test acc 90.00 %, training 10.0 s,")


def test_runs_that_differ_in_much_are_called_by_their_ids(cli: Cli) -> None:
    said = in_a_terminal(cli, 80)[f"compare {IDS[0]} {LONG}"]
    assert LONG in said
    assert "optimizer.momentum=" not in said
    facts = " ".join(said.split())
    assert "what differs data embedded / mnist" in facts
    assert "training time" in said, "a figure stands beside the names"
