"""A study whose runs are Slurm jobs, on a real Slurm of two nodes: at the same time, and found again after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep.launch import prepare
from lockstep.launch.slurm import launcher as slurm
from lockstep.run import CHECKPOINTS, list_runs, read_json, write_atomic
from lockstep.settings import load
from lockstep.study import cluster as study_cluster
from lockstep.study.plan import Item
from slurm_cluster import Cluster
from support import Cli, processes_of, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.cold]

STUDY = """
repeats = 2
metrics = ["seconds"]
[recipe]
data = "embedded"
train_limit = 480
test_limit = 100
epochs = 10
[placement]
launcher = "slurm"
threads = 1
ranks = 1
[factors]
global_batch = [48, 96]
"""


def test_jobs_run_at_once_and_a_killed_study_waits_for_those_it_left(cluster: Cluster, cli: Cli) -> None:
    cli.environment |= cluster.environment
    (cli.folder / "mine.toml").write_text(STUDY)
    process = cli.start("study", "run", "mine.toml")
    jobs = wait_for(
        lambda: len(found := sorted(cli.runs.glob("*/job.json"))) == 4 and found, what="all four jobs to be submitted"
    )
    numbers = {path.parent.name: (read_json(path) or {})["job"] for path in jobs}
    assert len({job.partition("_")[0] for job in numbers.values()}) == 1, "they ask for the same: one array"
    assert sorted(job.partition("_")[2] for job in numbers.values()) == ["0", "1", "2", "3"]
    process.send_signal(signal.SIGKILL)
    process.communicate()

    result = cli("study", "run", "mine.toml", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert (document["done"], document["failed"], document["left"]) == (4, 0, 0)
    assert {run.id for run in list_runs(cli.runs)} == set(numbers), "no run was submitted twice"
    assert {path.parent.name: (read_json(path) or {})["job"] for path in jobs} == numbers
    wait_for(lambda: not processes_of(cli.runs), seconds=10, what="every process of the runs to be gone")


def test_within_an_allocation_cells_race_and_share_their_trainings(cluster: Cluster, cli: Cli) -> None:
    cli.environment |= cluster.environment
    cells = "[cells.one]\nhosts = 1\nranks = 1\n[cells.two]\nhosts = 2\nranks = 2\n"
    text = STUDY.replace("[factors]\nglobal_batch = [48, 96]", cells).replace("ranks = 1\n[cells", "[cells")
    text = text.replace('["seconds"]', '["seconds", "accuracy"]').replace(
        "repeats = 2", "repeats = 1\nrace_minutes = 0.2"
    )
    (cli.folder / "mine.toml").write_text(text)
    done = subprocess.run(
        ["salloc", "--quiet", "-N2", *cli.argv("study", "run", "mine.toml", "--json")],
        cwd=cli.folder,
        env=cli.environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["done"], document["failed"], document["left"]) == (1, 0, 0), "one recipe, trained once"
    assert document["race"]["starts"] >= 3
    assert [cell["metrics"]["seconds"]["n"] for cell in document["cells"]] == [document["race"]["starts"]] * 2
    assert not any("jobs" in note for note in document["fairness"])


def test_one_scancel_ends_the_array_and_another_shape_is_a_job_of_its_own(cluster: Cluster, cli: Cli) -> None:
    cli.environment |= cluster.environment
    cells = "[cells.a]\nglobal_batch = 48\n[cells.b]\nglobal_batch = 96\n[cells.c]\nhosts = 2\nranks = 2\n"
    text = STUDY.replace("[factors]\nglobal_batch = [48, 96]", cells).replace("ranks = 1\n[cells", "[cells")
    (cli.folder / "mine.toml").write_text(text.replace("repeats = 2", "repeats = 1"))
    process = cli.start("study", "run", "mine.toml", "epochs=100000")
    wait_for(lambda: len(list(cli.runs.glob("*/job.json"))) == 3, what="all three to be submitted")
    jobs = [str((read_json(path) or {})["job"]) for path in sorted(cli.runs.glob("*/job.json"))]
    (array,) = {job.partition("_")[0] for job in jobs if "_" in job}
    (other,) = [job for job in jobs if "_" not in job]
    queue = cluster("squeue", "-h", "-r", "-o", "%A %F").stdout
    assert {line.split()[1] for line in queue.splitlines()} == {array, other}
    for job in (array, other):
        cluster("scancel", job)
    _, errors = process.communicate(timeout=90)
    assert "Traceback" not in errors
    states = [run.status() for run in list_runs(cli.runs)]
    assert {status["state"] for status in states} == {"failed"}
    causes = sorted(status["cause"] for status in states)
    for job, cause in zip(sorted(jobs), causes, strict=True):
        assert cause.startswith(f"Slurm job {job} was cancelled (scancel)"), causes


def test_ctrl_c_takes_all_jobs_back(cluster: Cluster, cli: Cli) -> None:
    cli.environment |= cluster.environment
    (cli.folder / "mine.toml").write_text(STUDY)
    process = cli.start("study", "run", "mine.toml", "epochs=100000")
    wait_for(lambda: len(list(cli.runs.glob("*/job.json"))) == 4, what="all four jobs to be submitted")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert {run.status()["state"] for run in list_runs(cli.runs)} == {"cancelled"}
    wait_for(lambda: cluster.idle() == 2, seconds=20, what="both nodes to be idle again")
    assert not processes_of(cli.runs)


def test_closing_the_terminal_leaves_all_jobs_and_the_same_command_waits_for_them(cluster: Cluster, cli: Cli) -> None:
    cli.environment |= cluster.environment
    (cli.folder / "mine.toml").write_text(STUDY)
    process = cli.start("study", "run", "mine.toml")
    wait_for(lambda: len(list(cli.runs.glob("*/job.json"))) == 4, what="all four jobs to be submitted")
    process.send_signal(signal.SIGHUP)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 129, errors
    assert "the terminal was closed: 4 Slurm jobs of study 'mine' go on; run the same command again" in errors
    assert not {run.recorded_status()["state"] for run in list_runs(cli.runs)} & {"cancelled", "failed"}
    jobs = {path.parent.name: (read_json(path) or {})["job"] for path in cli.runs.glob("*/job.json")}

    result = cli("study", "run", "mine.toml", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert (document["done"], document["failed"], document["left"]) == (4, 0, 0)
    assert {path.parent.name: (read_json(path) or {})["job"] for path in cli.runs.glob("*/job.json")} == jobs


def test_what_was_not_submitted_when_the_terminal_closed_is_not_under_way(tmp_path: Path) -> None:
    words = ["data=embedded", "launcher=slurm", "threads=1"]
    (left, _), (begun, _) = (prepare(*load([], words), runs=tmp_path) for _ in range(2))
    for run in (left, begun):
        run.write_status("starting", host="here")
    write_atomic(left.folder / "job.json", {"job": "7", "submitted": 1.0})
    assert study_cluster._leave([left, begun]) == 1
    assert [run.recorded_status()["state"] for run in (left, begun)] == ["starting", "cancelled"]


def test_a_job_that_went_on_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its own nor those of the run that it went on from."""
    words = ["data=embedded", "launcher=slurm", "threads=1"]
    (earlier, _), (run, _) = (prepare(*load([], words), runs=tmp_path) for _ in range(2))
    for each in (earlier, run):
        (each.folder / CHECKPOINTS).mkdir()
    item = Item(cell="a", repeat=1, seed=1, digest="d")
    kept: list[dict[str, Any]] = []
    monkeypatch.setattr(study_cluster, "keep", lambda session, step, record: kept.append(record))
    session = SimpleNamespace(cut={"d": earlier}, clock=lambda: 1.0, step=lambda item: item)
    assert study_cluster._keep(cast(Any, session), item, run, 0.0, {"state": "done", "job": "7"})
    assert not [each.id for each in (earlier, run) if (each.folder / CHECKPOINTS).exists()]
    assert [record.get("resumed") for record in kept] == [True]
    assert not session.cut


def test_a_job_that_gives_way_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a while to leave its nodes, waits for others, and has another turn: none of this is its end."""
    turns = ["RUNNING", "COMPLETING", "COMPLETING", "PENDING", "RUNNING"]
    seconds = iter([0.0, 0.0, 1.0, 100.0, 101.0, 102.0, 102.0])
    monkeypatch.setattr(slurm, "state", lambda job: slurm.JobState(turns.pop(0)))
    monkeypatch.setattr(slurm, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    words = ["data=embedded", "launcher=slurm", "threads=1", "slurm.requeue=true"]
    run, spec = prepare(*load([], words), runs=tmp_path)
    job = study_cluster._job(cast(Any, None), run, spec, "7", 0.0)
    assert [study_cluster._ended(cast(Any, None), job) for _ in range(5)] == [False] * 5
    assert run.recorded_status()["state"] == "planned"


@pytest.mark.skipif("LOCKSTEP_SLOW_TESTS" not in os.environ, reason="takes a minute: set LOCKSTEP_SLOW_TESTS=1")
@pytest.mark.timeout(400)
def test_a_preempted_study_goes_on_with_its_array(cluster: Cluster, cli: Cli) -> None:
    cli.environment |= cluster.environment
    (cli.folder / "mine.toml").write_text(STUDY)
    process = cli.start("study", "run", "mine.toml", "slurm.requeue=true", "epochs=120", "--json")
    running = wait_for(
        lambda: next((run for run in list_runs(cli.runs) if run.recorded_status()["state"] == "running"), None),
        what="a training",
    )
    wait_for(lambda: running.epochs(), what="its first epoch")
    job = str((read_json(running.folder / "job.json") or {})["job"])
    cluster("scontrol", "requeue", job)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    document = json.loads(output)
    assert (document["done"], document["failed"], document["left"]) == (4, 0, 0), errors
    assert "Restarts=1" in cluster("scontrol", "-o", "show", "job", job).stdout
    assert [record["epoch"] for record in running.epochs()] == list(range(1, 121))
    assert not list(cli.runs.glob("*/checkpoints"))
