"""`lockstep runs`: a study's runs as one line, conditions on any key, tags, deletion; and that wrong input leaves no run behind."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lockstep.cli.commands import cli as group
from lockstep.cli.conditions import condition
from lockstep.cli.runs import command
from lockstep.errors import InputError
from lockstep.files import locked
from lockstep.placement import Placement
from lockstep.plan import plan
from lockstep.recipe import Optimizer, Recipe
from lockstep.run import Part, Run, Spec, append_line, delete, list_runs, why_kept, write_atomic
from support import Cli

BEGAN = 1_700_000_000.0


def made(root: Path, name: str, state: str = "done", accuracy: float = 0.5, study: str = "", **recipe: Any) -> Run:
    """A run as it is on disk, with made-up figures; later ones are newer."""
    chosen = Recipe(**{"global_batch": 32, "epochs": 2, **recipe})
    placement = Placement(ranks=2, threads=1, launcher="spawn", backend="gloo", strategy="ddp")
    spec = Spec(
        id=name,
        created=BEGAN + len(list_runs(root)),
        lockstep="0.1",
        recipe=chosen,
        placement=placement,
        plan=plan(chosen, placement, 320, 100),
        part=Part(study=study, cell="a", block=0) if study else None,
    )
    run = Run.create(root, spec)
    write_atomic(run.folder / "status.json", {"state": state, "since": BEGAN})
    write_atomic(run.folder / "summary.json", {"test_accuracy": accuracy, "train_seconds": 6.0})
    return run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    root = tmp_path / "runs"
    made(root, "first", accuracy=0.95)
    for number in range(3):
        made(root, f"cell-{number}", accuracy=0.9, study="sizes", global_batch=32 << number)
    made(root, "sgd", accuracy=0.6, optimizer=Optimizer(name="sgd", lr=0.125), model_args={"k": 3})
    made(root, "broken", state="failed", accuracy=0.0)
    return root


def said(root: Path, *words: str) -> str:
    """What it prints; an error of one line counts as said."""
    done = CliRunner().invoke(command, [*words, "--runs", str(root)], env={"COLUMNS": "160"})
    if done.exception and not isinstance(done.exception, SystemExit):
        assert isinstance(done.exception, InputError), done.exception
        assert "\n" not in str(done.exception)
        return str(done.exception)
    return done.output


def ids(root: Path, *words: str) -> list[str]:
    done = CliRunner().invoke(command, [*words, "--runs", str(root), "--json"], catch_exceptions=False)
    return [row["id"] for row in json.loads(done.stdout)]


def test_a_studys_runs_are_one_line(runs: Path) -> None:
    lines = said(runs).splitlines()
    assert [line.split("  ")[0] for line in lines[2:6]] == ["first", "study sizes: 3 runs", "sgd", "broken"]
    assert "32…128" in lines[3]
    next_ = [line.strip().partition(f" --runs {runs}") for line in lines[-3:]]
    assert [(command, what) for command, _, what in next_] == [
        ("next: lockstep show broken", " (its results, and where the time went)"),
        ("lockstep study show sizes", " (compares its runs)"),
        ("lockstep runs sizes", " (lists them)"),
    ]
    assert "cell-2" in said(runs, "--each")
    assert ids(runs, "sizes") == ["cell-0", "cell-1", "cell-2"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["optimizer.name=sgd"], ["sgd"]),
        (["optimizer.lr=0.125", "ranks=2"], ["sgd"]),
        (["model_args.k=3"], ["sgd"]),
        (["accuracy>0.9"], ["first"]),
        (["test_nothing!=0.5"], []),  # what a run does not have is not unequal to anything
        (["accuracy>=90%", "study!=sizes"], ["first"]),
        (["status=failed"], ["broken"]),
        (["global_batch>32", "global_batch<=64"], ["cell-1"]),
        (["test_accuracy<0.7", "state=done"], ["sgd"]),
        (["study=sizes", "global_batch=128"], ["cell-2"]),
        (["threads!=1"], []),
        (["first", "sgd", "accuracy<0.9"], ["sgd"]),
        (["last", "last~1"], ["sgd", "broken"]),
    ],
)
def test_conditions(runs: Path, words: list[str], expected: list[str]) -> None:
    assert ids(runs, *words) == expected


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("batch=64", "unknown key 'batch': did you mean 'global_batch'?"),
        ("acuracy>0.9", "unknown key 'acuracy': did you mean 'accuracy'?"),
        ("optimizer.name=adamm", "optimizer.name=adamm: expected one of adam, adamw, rmsprop, sgd"),
        ("accuracy>high", "accuracy>high: expected a number, for example 0.9 or 90%"),
        ("state>done", "'>' compares numbers, and state is a word"),
        ("accuracy", "'accuracy' is a key: state a value"),
        ("nowhere", "no run 'nowhere'"),
    ],
)
def test_wrong_conditions(runs: Path, word: str, message: str) -> None:
    assert message in said(runs, word)


def test_emulated_hosts_are_a_condition() -> None:
    found = condition("hosts=emulated:2")
    assert found is not None
    assert (found.key, found.value, found.with_) == ("hosts", 2, {"emulated": True})


def test_a_tag_names_a_run(runs: Path) -> None:
    assert f"next: lockstep show best --runs {runs}" in said(runs, "accuracy>0.9", "--tag", "best")
    assert Run.find("best", runs).id == "first"
    assert ids(runs, "tag=best") == ids(runs, "best") == ["first"]
    assert "best" in said(runs).splitlines()[2], "the list shows it"
    # A tag is a whole name: no new run whose id begins with it takes its place.
    made(runs, "best-of-all")
    assert Run.find("best", runs).id == "first"
    said(runs, "sgd", "--tag", "best")
    with pytest.raises(InputError, match=r"'best' fits 2 runs .*: name one by its id"):
        Run.find("best", runs)
    assert [run.id for run in Run.find_all("best", runs)] == ["first", "sgd"]
    said(runs, "best", "--untag", "best")
    assert ids(runs, "tag=best") == []


@pytest.mark.parametrize("name", ["last", "last~2", "a=b", "a/b", ".hidden", "first", "a>b", ""])
def test_names_that_no_tag_has(runs: Path, name: str) -> None:
    assert "--tag" in said(runs, "first", "--tag", name)
    assert not Run(runs / "first").tags


def test_a_deletion_asks(runs: Path) -> None:
    assert "nobody can answer here: add --yes" in said(runs, "state=failed", "--delete")
    assert "say which runs" in said(runs, "--delete", "--yes")
    assert "do one of them" in said(runs, "first", "--delete", "--tag", "x")
    assert len(ids(runs)) == 6


@pytest.mark.parametrize(("answer", "left"), [("n\n", 6), ("\n", 6), ("y\n", 5)])
def test_a_question_at_a_terminal(runs: Path, tmp_path: Path, answer: str, left: int) -> None:
    """A real terminal: the question is asked there, and only a yes deletes."""
    master, slave = pty.openpty()
    process = subprocess.Popen(Cli(tmp_path).argv("runs", "first", "--delete", "--runs", str(runs)), stdin=slave, stdout=slave, stderr=slave)  # fmt: skip
    os.close(slave)
    os.write(master, answer.encode())
    assert process.wait(60) == 0
    os.close(master)
    assert len(ids(runs)) == left


def test_what_is_deleted_is_gone_and_what_is_under_way_stays(runs: Path) -> None:
    here = os.uname().nodename
    made(runs, "under-way").write_status("running", supervisor_pid=os.getpid(), host=here)
    made(runs, "about-to-start").write_status("planned")
    gone = subprocess.Popen(["true"])
    gone.wait()
    made(runs, "orphan").write_status("running", supervisor_pid=gone.pid, host=here)
    leftover = runs / ".tmp-0000-deleted"  # of a deletion that was killed
    leftover.mkdir()
    write_atomic(leftover / "run.json", {})
    assert ".tmp-0000-deleted" not in ids(runs)
    text = said(runs, "ranks=2", "--delete", "--yes")
    assert "under-way stays: it is running" in text
    assert "about-to-start stays: it is planned" in text
    assert "deleted 7 runs" in text
    assert text.splitlines()[-1] == f"next: lockstep runs --runs {runs} (lists what is left)"
    assert ids(runs) == ["under-way", "about-to-start"]
    assert not leftover.exists()
    assert "nothing is deleted" in said(runs, "under-way", "--delete", "--yes")


def test_nothing_outside_the_folder_of_runs_is_deleted(runs: Path, tmp_path: Path) -> None:
    outside = made(tmp_path / "elsewhere", "mine")
    (runs / "link").symlink_to(outside.folder)
    assert "is not in" in said(runs, str(outside.folder), "--delete", "--yes")
    for run in (outside, Run(runs / "link")):
        assert "not a folder in" in why_kept(run, runs)
        with pytest.raises(InputError, match="is not deleted"):
            delete(run, runs)
    assert outside.folder.is_dir()


def test_a_study_that_loses_runs_is_named_and_one_that_is_being_run_keeps_them(runs: Path) -> None:
    folder = runs / "studies" / "sizes"
    folder.mkdir(parents=True)
    write_atomic(folder / "study.json", {})
    append_line(folder / "log.jsonl", {"digest": "d", "run": "cell-1", "cell": "a", "repeat": 0, "seed": 1})
    with locked(folder / "lock", "running this study"):
        assert "is being run by process" in said(runs, "cell-1", "--delete", "--yes")
    assert "study 'sizes' loses 1 run" in said(runs, "cell-1", "--delete", "--yes")
    assert "cell-1" not in ids(runs)


def test_completion_knows_runs_tags_and_keys(runs: Path) -> None:
    said(runs, "first", "--tag", "favourite")

    def completed(command_line: str, incomplete: str) -> str:
        environment = {
            "_LOCKSTEP_COMPLETE": "bash_complete",
            "COMP_WORDS": command_line,
            "COMP_CWORD": str(len(command_line.split())),
            "LOCKSTEP_RUNS": str(runs),
        }
        return CliRunner(env=environment).invoke(group, prog_name="lockstep").output

    assert "plain,favourite" in completed("lockstep show", "")
    assert "plain,cell-1" in completed("lockstep runs", "")


# --- wrong input -----------------------------------------------------------------------------------------------------------

OWN = """
from torch import nn

class Few(nn.Module):
    "Three classes, where the data have ten."
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(784, 3)
    def forward(self, images):
        return self.last(images.flatten(1))

class FailsInTraining(Few):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(784, 10)
    def forward(self, images):
        if self.training:
            raise RuntimeError("not with me")
        return super().forward(images)

def whole_batch(output, targets):
    return (output.argmax(1) == targets).double().mean()

def raises(output, targets):
    raise KeyError("mine")
"""
SMALL = ("data=embedded", "train_limit=128", "test_limit=50", "epochs=1", "threads=1", "backend=gloo", "fused=false")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "model=own.py:Few", "ranks=2"], "answers 3 classes"),
        (["run", "metrics=own.py:whole_batch"], "return one number for each sample"),
        (["run", "metrics=own.py:raises"], "metrics=own.py:raises raised KeyError: 'mine'"),
        (["run", "loss=own.py:raises"], "loss=own.py:raises raised KeyError: 'mine'"),
        (["run", "ranks=2", "hosts=2", "rendezvous=nohost.invalid:1", "--host-index", "1", "--name", "x"], "there is no host"),
        (["race", "model=own.py:Few global_batch=32", "model=own.py:Few global_batch=64", "--all", " ".join(SMALL)], "answers 3 classes"),
    ],
    ids=lambda value: value[1].partition(" ")[0] if isinstance(value, list) else "",
)  # fmt: skip
def test_wrong_input_leaves_no_run_behind(cli: Cli, words: list[str], message: str) -> None:
    (cli.folder / "own.py").write_text(OWN)
    assert message in cli.error(*words, *(SMALL if words[0] == "run" else ()), code=2)
    left = [path for path in cli.runs.rglob("*") if path.name in ("run.json", "race.json")]
    assert not left


def test_a_model_that_fails_in_its_first_batch_is_a_failed_run(cli: Cli) -> None:
    (cli.folder / "own.py").write_text(OWN)
    assert "RuntimeError: not with me" in cli.error("run", "model=own.py:FailsInTraining", *SMALL, code=3)
    (run,) = list_runs(cli.runs)
    assert run.status()["state"] == "failed"


@pytest.mark.parametrize(("state", "follows"), [("starting", True), ("running", True), ("done", False)])
def test_of_a_slurm_job_that_goes_on_show_says_how_to_follow_it(cli: Cli, state: str, follows: bool) -> None:
    """Its ranks may be silent: it waits for its turn."""
    run = made(cli.runs, "left", state=state)
    write_atomic(run.folder / "job.json", {"job": "7", "submitted": BEGAN})
    assert ("next: lockstep follow left" in cli("show", "left").stderr) is follows
