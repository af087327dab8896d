"""Studies in real processes: killed and resumed, stopped, with cells that fail."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import RunCancelled
from lockstep.launch.supervise import Progress
from lockstep.placement import Placement
from lockstep.reading import read_records
from lockstep.recipe import Recipe
from lockstep.run import CHECKPOINTS, Options, Run, Spec, list_runs
from lockstep.study import execute, make, run_study
from lockstep.study.folder import StudyFolder
from lockstep.study.plan import plan
from lockstep.study.session import Step, Watcher
from support import Cli, processes_of, wait_for

STUDY = """
repeats = 2
baseline = "one"
[recipe]
data = "embedded"
train_limit = 480
test_limit = 100
global_batch = 48
epochs = 1
[placement]
threads = 1
backend = "gloo"
[cells.one]
ranks = 1
[cells.broken]
model = "net.py:Net"
[cells.elsewhere]
ranks = 7
"""
NET = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = torch.nn.Linear(784, 10), 0
    def forward(self, x):
        self.calls += 1
        if self.calls > 5:
            raise MemoryError("no memory left")
        return self.layer(x.flatten(1))
"""


@pytest.fixture
def lab(cli: Cli) -> Cli:
    (cli.folder / "mine.toml").write_text(STUDY)
    (cli.folder / "net.py").write_text(NET)
    return cli


def records(cli: Cli, name: str = "mine") -> list[dict[str, Any]]:
    """How its runs ended."""
    return [line for line in read_records(cli.runs / "studies" / name / "log.jsonl", dict[str, Any]) if "ended" in line]


def under_way(cli: Cli) -> list[Run]:
    return [run for run in list_runs(cli.runs) if run.status()["state"] == "running"]


@pytest.mark.cold
def test_a_killed_study_goes_on_where_it_was_and_a_failed_cell_is_a_result(lab: Cli) -> None:
    process = lab.start("study", "run", "mine.toml", "epochs=15")
    wait_for(lambda: under_way(lab), what="a run of the study")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    wait_for(lambda: not processes_of(lab.runs), what="the ranks to end with it")
    killed = {run.id for run in list_runs(lab.runs) if run.recorded_status()["state"] in ("starting", "running")}
    assert killed

    result = lab("study", "run", "mine.toml", "epochs=15", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert (document["done"], document["failed"], document["left"]) == (2, 2, 0)
    one, broken, elsewhere = document["cells"]
    assert one["done"] == 2
    assert not killed & set(one["runs"]), "what was killed was run again, in a folder of its own"
    assert broken["done"] == 0
    assert broken["failed"][0].startswith("in the race: rank 0")
    assert len(broken["failed"]) == 3
    assert all("MemoryError: no memory left" in text for text in broken["failed"])
    assert elsewhere["left_out"].startswith("global_batch=48 does not divide by ranks=7")
    folder = document["study"]
    assert len(records(lab, folder)) == 4
    overhead = document["overhead"]
    parts = overhead["prepare_s"] + overhead["start_s"] + overhead["finish_s"] + overhead["between_s"]
    assert 0 < overhead["overhead_s"] <= 2 * parts

    again = lab("study", "run", "mine.toml", "epochs=15")
    assert again.returncode == 0
    assert (
        "• broken failed\n  why  in the race: rank 0 after step 4: MemoryError: no memory left (net.py:10); 2 more failures"
        in again.stdout
    )
    assert len(records(lab, folder)) == 4, "nothing was run again"
    before = {run.id for run in list_runs(lab.runs)}

    more = json.loads(lab("study", "run", "mine.toml", "epochs=15", "--repeats", "3", "--json").stdout)
    assert more["cells"][0]["done"] == 3
    assert set(one["runs"]) < set(more["cells"][0]["runs"])
    assert len({run.id for run in list_runs(lab.runs)} - before) == 1, "a cell that always failed is given up"
    shown = json.loads(lab("study", "show", "last", "--json").stdout)
    assert shown["cells"] == more["cells"]
    plan = json.loads(lab("study", "run", "mine.toml", "epochs=15", "--repeats", "4", "--dry-run", "--json").stdout)
    assert plan["cells"][0]["basis"] == "its own runs"


@pytest.mark.cold
def test_ctrl_c_stops_in_order_and_one_process_at_a_time_runs_a_study(lab: Cli) -> None:
    process = lab.start("study", "run", "mine.toml", "epochs=100000", "train_limit=481")
    folder = wait_for(lambda: next(iter((lab.runs / "studies").glob("mine-*")), None), what="the study's folder")
    (run,) = wait_for(lambda: under_way(lab), what="a run of the study")
    message = lab.error("study", "run", "mine.toml", "epochs=100000", "train_limit=481", code=2)
    assert message.startswith(f"study '{folder.name}' is being run by process {process.pid}: wait for it")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert "stopped; run the same command again to go on" in errors
    assert "Traceback" not in errors
    assert run.status()["state"] == "cancelled"
    assert not processes_of(lab.runs)


def test_a_budget_that_is_used_up_starts_nothing(lab: Cli) -> None:
    result = lab("study", "run", "mine.toml", "budget_minutes=0.001")
    assert result.returncode == 0, result.stderr
    assert "budget_minutes=0.001 is used up" in result.stderr
    assert list_runs(lab.runs) == []


def test_dry_run_shows_cells_and_time_and_starts_nothing(lab: Cli) -> None:
    result = lab("study", "run", "mine.toml", "--dry-run")
    assert result.returncode == 0, result.stderr
    assert (
        "2 cells race for up to 60 s; 2 recipes to train with 2 seeds, up to 8 where that does not settle it: "
        in result.stdout
    )
    assert "4 of 4 trainings to do, about" in result.stdout
    assert "a guess" in result.stdout
    assert "left out: global_batch=48 does not divide by ranks=7" in result.stdout
    assert not lab.runs.exists()


def test_wrong_words_are_one_line(lab: Cli) -> None:
    assert "no study 'minee'" in lab.error("study", "run", "minee", code=2)
    assert "the cells of study 'mine' set it themselves" in lab.error("study", "run", "mine.toml", "ranks=2", code=2)
    assert "has no [quick] table" in lab.error("study", "run", "mine.toml", "--quick", code=2)
    assert "no study 'none'" in lab.error("study", "show", "none", code=2)
    listed = json.loads(lab("study", "list", "--json").stdout)
    assert {"launchers", "topology", "machine"} <= {row["study"] for row in listed}


def test_from_python(tmp_path: Path) -> None:
    recipe = Recipe(data="embedded", test_limit=50, global_batch=48, epochs=1)
    made = make("small", recipe, Placement(threads=1), cells={"a": {"train_limit": 96}}, repeats=1)
    document = run_study(made, runs=tmp_path)
    assert document["cells"][0]["done"] == 1
    assert document["cells"][0]["metrics"]["accuracy"]["n"] == 1
    first = [run.id for run in list_runs(tmp_path)]
    run_study(made, runs=tmp_path)
    assert [run.id for run in list_runs(tmp_path)] == first


class Impatient(Watcher):
    """Presses Ctrl-C when a training has its first checkpoint; when it goes on from another one's, at once."""

    def begins(self, step: Step) -> Progress | None:
        def watch(run: Run, spec: Spec) -> None:
            if run.has_checkpoint or (spec.options.resume_from and run.epochs()):
                raise KeyboardInterrupt

        return watch


LONG = Recipe(data="embedded", train_limit=960, test_limit=50, global_batch=48, epochs=40)


def stopped_once(root: Path) -> tuple[Callable[[Watcher], dict[str, int]], Run]:
    """A study whose only training was stopped after its first epoch, and the call that goes on with it."""
    made = make("long", LONG, Placement(threads=1), cells={"a": {}}, repeats=1)
    options, folder = Options(save_model=False), StudyFolder.of("long", root)

    def go_on(watcher: Watcher) -> dict[str, int]:
        return execute.run(folder, plan(made, options, root), options, watcher=watcher)

    with pytest.raises(RunCancelled, match="run the same command again"):
        go_on(Impatient())
    (stopped,) = list_runs(root)
    assert 1 <= len([epoch for epoch in stopped.epochs() if not epoch.get("partial")]) < LONG.epochs
    return go_on, stopped


def done(root: Path) -> Run:
    (run,) = [run for run in list_runs(root) if run.recorded_status()["state"] == "done"]
    return run


def test_a_long_training_that_was_stopped_goes_on_from_its_last_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execute, "LONG_TRAINING_S", 0.0)
    go_on, stopped = stopped_once(tmp_path)
    # Stopped again before it has a checkpoint of its own, it still goes on from the first one's.
    with pytest.raises(RunCancelled):
        go_on(Impatient())
    (again,) = [run for run in list_runs(tmp_path) if run.id != stopped.id]
    assert again.spec().options.resume_from == str(stopped.folder)
    shutil.rmtree(again.folder / CHECKPOINTS, ignore_errors=True)
    assert go_on(Watcher()) == {"done": 1, "failed": 0, "left": 0}
    whole = done(tmp_path)
    assert whole.spec().options.resume_from == str(stopped.folder)
    assert [epoch["epoch"] for epoch in whole.epochs()] == list(range(1, LONG.epochs + 1))
    assert not whole.has_checkpoint
    assert not stopped.has_checkpoint, "what nobody needs any more is gone"

    run_study(make("again", LONG, Placement(threads=1), cells={"a": {}}, repeats=1), runs=tmp_path / "b")
    summaries = [run.summary() or {} for run in (whole, done(tmp_path / "b"))]
    assert summaries[0]["weights_sha256"] == summaries[1]["weights_sha256"], "the same bits as in one go"
    assert summaries[0]["train_images"] == summaries[1]["train_images"] == LONG.epochs * 960


def test_a_training_whose_checkpoints_are_damaged_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execute, "LONG_TRAINING_S", 0.0)
    go_on, stopped = stopped_once(tmp_path)
    for file in (stopped.folder / CHECKPOINTS).glob("*.pt"):
        file.write_bytes(b"no checkpoint")
    heard: list[str] = []
    watcher = Watcher()
    monkeypatch.setattr(watcher, "says", heard.append)
    assert go_on(watcher) == {"done": 1, "failed": 0, "left": 0}
    assert any("could not go on from its checkpoint, and begins anew" in text for text in heard), heard
    assert done(tmp_path).spec().options.resume_from is None


class Killing(Watcher):
    """Kills the first rank of a training that goes on from a checkpoint, as soon as it has one of its own; once."""

    def __init__(self) -> None:
        super().__init__()
        self.killed: Run | None = None

    def begins(self, step: Step) -> Progress | None:
        def watch(run: Run, spec: Spec) -> None:
            if spec.options.resume_from and run.has_checkpoint and self.killed is None:
                self.killed = run
                os.kill(int(run.rank_statuses()[0]["pid"]), signal.SIGKILL)

        return watch


@pytest.mark.cold
def test_a_training_that_goes_on_and_is_killed_goes_on_from_where_it_got_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execute, "LONG_TRAINING_S", 0.0)
    go_on, _ = stopped_once(tmp_path)
    watcher = Killing()
    heard: list[str] = []
    monkeypatch.setattr(watcher, "says", heard.append)
    assert go_on(watcher) == {"done": 1, "failed": 0, "left": 0}
    assert any("goes on from its last checkpoint: run failed: rank 0 was killed" in text for text in heard), heard
    assert watcher.killed is not None
    assert done(tmp_path).spec().options.resume_from == str(watcher.killed.folder)


MEASURED = """
repeats = 2
metrics = ["measures.py:margin", "accuracy"]
[recipe]
data = "embedded"
train_limit = 480
test_limit = 100
global_batch = 48
epochs = 1
metrics = "accuracy,measures.py:margin"
[placement]
threads = 1
[cells.slow]
optimizer.lr = 0.0001
[cells.fast]
optimizer.lr = 0.01
"""
MARGIN = """
def margin(scores, targets):
    \"\"\"How far the right class is below the best one: never above 0.\"\"\"
    return scores.gather(1, targets[:, None]).squeeze(1) - scores.amax(1)
"""


def test_a_measure_of_ones_own_is_compared_seed_by_seed(cli: Cli) -> None:
    (cli.folder / "measured.toml").write_text(MEASURED)
    (cli.folder / "measures.py").write_text(MARGIN)
    done = cli("study", "run", "measured.toml", "--repeats", "2")
    assert done.returncode == 0, done.stderr
    shown = json.loads(cli("study", "show", "measured", "--json").stdout)
    assert shown["metrics"] == ["margin", "accuracy"]
    slow, fast = (cell["metrics"]["margin"] for cell in shown["cells"])
    assert len(slow["values"]) >= 2
    assert max([*slow["values"], *fast["values"]]) <= 0
    # By seed, as accuracy is; of numbers below zero there is no ratio.
    against = fast["against_baseline"]
    assert against["n"] == len(fast["values"])
    assert against["effect"] is None
    assert against["verdict"] in ("higher", "lower", "the same", "not significant", "too few")
    assert "test margin" in cli("study", "show", "measured").stdout
    assert cli("report", "measured", "-o", "page.html").returncode == 0
    assert "test margin" in (cli.folder / "page.html").read_text()
    assert "no such metric 'marginn'; did you mean 'margin'?" in cli.error(
        "study", "run", "measured.toml", 'metrics=["marginn"]', code=2
    )
