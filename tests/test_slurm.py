"""`launcher=slurm` on a real Slurm: two nodes on loopback (slurm_cluster.py), real jobs, real faults."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.errors import InputError
from lockstep.launch import prepare
from lockstep.launch.base import monitor_argv
from lockstep.launch.ending import FolderWatch
from lockstep.launch.slurm import launcher as slurm
from lockstep.launch.slurm import script as slurm_script
from lockstep.launch.stall import Stalled
from lockstep.measure.records import read_steps
from lockstep.placement import Placement, Slurm
from lockstep.plan import plan
from lockstep.recipe import Recipe
from lockstep.resolve import resolve
from lockstep.run import CHECKPOINTS, QUEUE_AGAIN, Run, Spec, list_runs, read_json, write_atomic
from lockstep.settings import load
from lockstep.training.checkpoint import checkpoints_in
from slurm_cluster import Cluster, with_mpich
from support import SHORT, Cli, fill, processes_of, removed_from_under, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.cold]

GOLDEN = Path(__file__).parent / "golden"
ON_SLURM = ("launcher=slurm", "threads=1")
ENDLESS = (*SHORT, "epochs=100000", *ON_SLURM)

SCRIPTS = {
    "srun": Placement(launcher="slurm", hosts=2, ranks=4, threads=2),
    "torchrun": Placement(
        launcher="slurm",
        hosts=2,
        ranks=4,
        threads=2,
        slurm=Slurm(
            partition="debug,long",
            account="physics",
            time="1-12:00:00",
            ranks_by="torchrun",
            directives=["--exclusive", "--mail-type=END"],
            setup=["module load python", 'echo "on $SLURM_JOB_NODELIST"'],
        ),
    ),
    "gpu": Placement(launcher="slurm", hosts=2, ranks=8, threads=8, device="cuda"),
    "requeue": Placement(launcher="slurm", hosts=2, ranks=2, threads=1, slurm=Slurm(time="02:00:00", requeue=True)),
    "mpi": Placement(launcher="slurm", ranks=2, threads=1, backend="mpi", slurm=Slurm(mpi="pmi2", gres="fpga:1")),
}


def spec_of(placement: Placement) -> Spec:
    recipe, placement, _ = resolve(Recipe(global_batch=48), placement)
    worked = plan(recipe, placement, 480, 48)
    return Spec(id="the run", created=0.0, lockstep="0", recipe=recipe, placement=placement, plan=worked)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_script_is_the_golden_one(name: str) -> None:
    text = slurm_script.text(spec_of(SCRIPTS[name]), Path("/shared/my runs/one")).replace(sys.executable, "PYTHON")
    assert text == (GOLDEN / f"sbatch-{name}.txt").read_text()
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


def test_the_script_of_an_array_is_the_golden_one() -> None:
    spec = spec_of(SCRIPTS["requeue"])
    text = slurm_script.array("my study", spec, [Path("/shared/my runs/one"), Path("/shared/two")], 32)
    assert text == (GOLDEN / "sbatch-array.txt").read_text()
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    assert slurm_script.asked_alike(spec, spec)
    assert not slurm_script.asked_alike(spec, spec_of(SCRIPTS["srun"]))


@pytest.mark.parametrize("name", ["srun", "torchrun"])
def test_the_script_of_a_short_job_is_the_golden_one(name: str) -> None:
    text = slurm_script.text(spec_of(SCRIPTS[name]), Path("/shared/my runs/one"), "lockstep.preflight.worker")
    text = text.replace(sys.executable, "PYTHON")
    assert text == (GOLDEN / f"sbatch-short-{name}.txt").read_text()
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Slurm(partition="a b"), "slurm.partition='a b'"),
        (Slurm(partition="debug\n#SBATCH --uid=0"), "slurm.partition="),
        (Slurm(account="$(id)"), "slurm.account="),
        (Slurm(time="half an hour"), "slurm.time='half an hour' is not what Slurm takes here, for example"),
        (Slurm(gres="gpu:1;id"), "slurm.gres="),
        (Slurm(mpi="pmi2 --uid=0"), "slurm.mpi="),
        (Slurm(directives=["--exclusive\nrm -rf /"]), "slurm.directives"),
        (Slurm(directives=["exclusive"]), "slurm.directives: 'exclusive' is not one sbatch option"),
        (Slurm(requeue=True, time="00:00:30"), "slurm.grace=60: slurm.time=00:00:30 is not longer than these seconds"),
        (Slurm(requeue=True, time="1"), "slurm.grace=60: slurm.time=1 is not longer"),
        (Slurm(requeue=True, time="1:30", grace=90), "slurm.grace=90: slurm.time=1:30 is not longer"),
    ],
)
def test_what_would_mean_something_else_in_the_script_is_refused(options: Slurm, words: str) -> None:
    with pytest.raises(InputError) as error:
        slurm.starts(spec_of(Placement(launcher="slurm", slurm=options)), Path("/shared/one"), 0)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [("90", 5400), ("1:30", 90), ("00:30:00", 1800), ("1-12", 129_600), ("1-12:30", 131_400), ("1-00:00:01", 86_401)],
)
def test_a_time_limit_is_read_as_slurm_reads_it(limit: str, seconds: int) -> None:
    assert slurm_script._seconds(limit) == seconds
    slurm_script.check(Placement(launcher="slurm", slurm=Slurm(requeue=True, time=limit)))
    slurm_script.check(Placement(launcher="slurm", slurm=Slurm(time="00:00:30")))
    slurm_script.check(Placement(launcher="slurm", slurm=Slurm(requeue=True, time="0")))


def test_the_command_is_known_without_a_slurm() -> None:
    start = slurm.starts(spec_of(SCRIPTS["srun"]), Path("/shared/one"), 0)
    assert [words.argv for words in start] == [["sbatch", "/shared/one/job.sbatch"]]


def test_without_slurm_the_error_says_what_to_install(cli: Cli) -> None:
    cli.environment["PATH"] = "/nonexistent"
    message = cli.error("run", *SHORT, *ON_SLURM, "ranks=2", code=2)
    assert message.startswith("launcher=slurm needs sbatch, scontrol, scancel: install Slurm's commands (slurm-client")
    assert not cli.runs.exists(), "wrong input leaves no run"


@pytest.fixture
def on_cluster(cluster: Cluster, cli: Cli) -> Iterator[Cli]:
    """The command line with this cluster's configuration. Whatever the test did, no process of its runs is left."""
    cli.environment |= cluster.environment
    yield cli
    wait_for(lambda: not processes_of(cli.runs), seconds=10, what="every process of the runs to be gone")
    wait_for(lambda: cluster.idle() == 2, seconds=10, what="both nodes to be idle again")


def assert_same_as_alone(document: dict[str, Any], alone: dict[str, Any]) -> None:
    assert document["ranks_agree"]
    assert document["train_loss"] == pytest.approx(alone["train_loss"], rel=1e-5)
    assert document["test_accuracy"] == pytest.approx(alone["test_accuracy"], abs=0.01)


def started(cli: Cli, *words: str) -> tuple[subprocess.Popen[str], Run, str]:
    """An endless run that has taken its first steps on every rank, and its job."""
    process = cli.start("run", *ENDLESS, *words)
    run: Run = wait_for(lambda: next((Run(p.parent) for p in cli.runs.glob("*/job.json")), None), what="the job")
    ranks = run.spec().plan.ranks
    steps = lambda rank: len(read_steps(run.rank_folder(rank) / "steps.bin"))  # noqa: E731
    wait_for(
        lambda: process.poll() is not None or all(steps(rank) > 5 for rank in range(ranks)), what="steps on every rank"
    )
    assert process.poll() is None, process.communicate()
    wait_for(lambda: len(run.rank_statuses()) == ranks, what="a sign of life of every rank")
    return process, run, str((read_json(run.folder / "job.json") or {})["job"])


def end_of(process: subprocess.Popen[str], run: Run, code: int) -> str:
    """The last line of a run that must end by itself, with no process left."""
    _, errors = process.communicate(timeout=40)
    assert process.returncode == code, errors
    assert "Traceback" not in errors
    wait_for(lambda: not processes_of(run.folder), seconds=10, what="every process to be gone")
    return errors.strip().splitlines()[-1]


def test_two_nodes_compute_what_one_process_computes(on_cluster: Cli, alone: dict[str, Any]) -> None:
    """In a folder whose name has all that a shell, sbatch and srun could misunderstand."""
    on_cluster.runs = on_cluster.folder / "50% $(of) 'my' runs"
    on_cluster.environment["LOCKSTEP_RUNS"] = str(on_cluster.runs)
    document = on_cluster.run(*SHORT, *ON_SLURM, "hosts=2", "ranks=4", "slurm.partition=test", "slurm.time=00:10:00")
    assert_same_as_alone(document, alone)
    assert len(document["ranks"]) == 4
    run = Run.find("last", on_cluster.runs)
    assert run.status()["state"] == "done"
    record = read_json(run.folder / "job.json") or {}
    assert (record["name"], record["exit_code"], record["nodes"]) == ("COMPLETED", "0:0", "node[1-2]")
    assert [path.name for path in on_cluster.runs.iterdir()] == [run.id], "nothing was written beside the run"


def test_four_ranks_on_two_nodes_by_torchrun(on_cluster: Cli, alone: dict[str, Any]) -> None:
    document = on_cluster.run(*SHORT, *ON_SLURM, "hosts=2", "ranks=4", "strategy=ddp", "slurm.ranks_by=torchrun")
    assert_same_as_alone(document, alone)
    assert len(document["ranks"]) == 4


def test_quantization_aware_training_is_the_same_as_by_spawn(on_cluster: Cli) -> None:
    words = (*SHORT, "quantize=qat", "ranks=2", "backend=gloo", "strategy=ddp", "threads=1")
    here = on_cluster.run(*words, "launcher=spawn")
    there = on_cluster.run(*words, *ON_SLURM, "hosts=2")
    assert there["ranks_agree"]
    assert there["weights_sha256"] == here["weights_sha256"], "weights and ranges, bit by bit"
    assert there["int8_accuracy"] == here["int8_accuracy"]


@with_mpich
def test_the_mpi_backend_through_pmi2(on_cluster: Cli, alone: dict[str, Any]) -> None:
    words = ("hosts=2", "ranks=2", "backend=mpi")
    assert_same_as_alone(on_cluster.run(*SHORT, *ON_SLURM, *words, "slurm.mpi=pmi2"), alone)
    message = on_cluster.error("run", *SHORT, *ON_SLURM, *words, "slurm.mpi=none", code=2)
    assert "the launcher started 2 ranks, but" in message, "never two worlds of one rank"


@with_mpich
def test_ranks_that_mpirun_starts_on_two_nodes(on_cluster: Cli, alone: dict[str, Any]) -> None:
    words = ("hosts=2", "ranks=4", "backend=mpi", "slurm.ranks_by=mpirun")
    document = on_cluster.run(*SHORT, *ON_SLURM, *words)
    assert_same_as_alone(document, alone)
    assert len(document["ranks"]) == 4
    message = on_cluster.error("run", *SHORT, *ON_SLURM, *words, "slurm.mpi=pmi2", code=2)
    assert "slurm.mpi=pmi2 is an option of srun" in message


@with_mpich
def test_a_rank_under_mpirun_that_is_killed_is_named(on_cluster: Cli) -> None:
    process, run, _ = started(on_cluster, "hosts=2", "ranks=2", "slurm.ranks_by=mpirun", "backend=gloo")
    os.kill(int(run.rank_statuses()[1]["pid"]), signal.SIGKILL)
    last = end_of(process, run, code=3)
    assert re.match(r"lockstep: run failed: rank 1 was killed by SIGKILL after step \d+", last), last


def test_a_disk_that_fills_up_in_mid_run(on_cluster: Cli, small_disk: Path) -> None:
    on_cluster.runs = small_disk
    on_cluster.environment["LOCKSTEP_RUNS"] = str(small_disk)
    process, run, _ = started(on_cluster, "epochs=1000", "hosts=2", "ranks=2")
    fill(small_disk)
    said = end_of(process, run, code=3)
    assert re.match(rf"lockstep: run failed: rank \d after step \d+: no room for the run in {small_disk}", said), said
    status = run.recorded_status()
    assert (status["state"], status["slurm_state"]) == ("failed", "FAILED")
    assert "no room for the run" in status["cause"]
    assert len(read_steps(run.rank_folder(0) / "steps.bin")) > 5


def test_a_run_folder_that_is_removed_in_mid_run(on_cluster: Cli) -> None:
    process, run, _ = started(on_cluster, "hosts=2", "ranks=2")
    removed_from_under(run.folder)
    said = end_of(process, run, code=3)
    assert said == f"lockstep: run failed: the run folder {run.folder} was removed while the run was under way"
    assert not run.folder.exists()


def allocated(cli: Cli, nodes: int, *words: str) -> subprocess.Popen[str]:
    """`lockstep run` as people type it into the shell that salloc gives them."""
    return subprocess.Popen(
        ["salloc", "--quiet", f"-N{nodes}", *cli.argv("run", *words)],
        env=cli.environment,
        cwd=cli.folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_inside_an_allocation_srun_starts_the_ranks(on_cluster: Cli, alone: dict[str, Any]) -> None:
    process = allocated(on_cluster, 2, *SHORT, *ON_SLURM, "hosts=2", "ranks=2", "--json")
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert_same_as_alone(json.loads(output), alone)
    run = Run.find("last", on_cluster.runs)
    assert run.spec().command[0][-2:] == ["lockstep.launch.slurm.step", str(run.folder / "job.sbatch")]
    assert not (run.folder / "job.json").exists(), "no job of its own"


def test_inside_an_allocation_contenders_race(on_cluster: Cli) -> None:
    """Ranks of one node and of two, all in one allocation; they call the race's desk, and take turns."""
    words = ["hosts=1 ranks=1", "hosts=2 ranks=2", "--all", " ".join([*SHORT, *ON_SLURM]), "--budget", "60s", "--json"]
    process = subprocess.Popen(
        ["salloc", "--quiet", "-N2", *on_cluster.argv("race", *words)],
        env=on_cluster.environment,
        cwd=on_cluster.folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    document = json.loads(output)
    assert document["failures"] == {}
    (ratio,) = document["ratios"]
    assert ratio["rounds"] >= 4
    assert ratio["effect"] > 0
    assert not processes_of(on_cluster.folder)


def test_inside_an_allocation_ranks_end_with_the_command(on_cluster: Cli) -> None:
    process = allocated(on_cluster, 2, *ENDLESS, "hosts=2", "ranks=2")
    run: Run = wait_for(lambda: next((Run(p.parent) for p in on_cluster.runs.glob("*/run.json")), None), what="the run")
    wait_for(lambda: run.recorded_status()["state"] == "running", what="the ranks")
    os.kill(int(run.recorded_status()["supervisor_pid"]), signal.SIGKILL)
    process.communicate(timeout=20)
    wait_for(lambda: not processes_of(run.folder), seconds=5, what="every process to be gone")
    assert run.status()["state"] == "failed"


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (("hosts=2", "ranks=2"), 2, r"hosts=2, but this is inside Slurm job \d+ with 1 node: ask salloc for more"),
        (("ranks=3",), 3, r"srun in Slurm job \d+ started no rank: srun: error: .*[Mm]ore processors requested"),
    ],
)
def test_an_allocation_that_is_too_small(on_cluster: Cli, words: tuple[str, ...], code: int, expected: str) -> None:
    process = allocated(on_cluster, 1, *SHORT, *ON_SLURM, *words)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == code, errors
    assert re.search(expected, errors.strip().splitlines()[-1]), errors


def test_kill_9_of_one_rank_ends_the_job_and_names_it(on_cluster: Cli) -> None:
    process, run, _ = started(on_cluster, "hosts=2", "ranks=2")
    os.kill(int(run.rank_statuses()[1]["pid"]), signal.SIGKILL)
    last = end_of(process, run, code=3)
    assert re.match(r"lockstep: run failed: rank 1 was killed by SIGKILL after step \d+", last), last
    status = run.status()
    assert (status["state"], status["rank"], status["signal"]) == ("failed", 1, "SIGKILL")
    assert (read_json(run.folder / "job.json") or {})["name"] == "FAILED"


def test_kill_9_of_a_torchrun_agent_leaves_no_rank_training(on_cluster: Cli) -> None:
    process, run, _ = started(on_cluster, "hosts=2", "ranks=2", "slurm.ranks_by=torchrun")
    agent = Path(f"/proc/{run.rank_statuses()[1]['pid']}/stat").read_text().rpartition(")")[2].split()[1]
    assert b"lockstep.launch.agent" in Path(f"/proc/{agent}/cmdline").read_bytes()
    os.kill(int(agent), signal.SIGKILL)
    last = end_of(process, run, code=3)
    # Either the other rank noticed first, or srun ended it before it could say so.
    assert re.search(
        r"run failed: (rank 0 after step \d+: lost the other ranks|Slurm job .* node2: task 1: Killed)", last
    )
    assert run.status()["state"] == "failed"


def test_a_stopped_rank_is_noticed_and_the_job_ended(on_cluster: Cli) -> None:
    process, run, _ = started(on_cluster, "hosts=2", "ranks=2", "timeout_s=8")
    os.kill(int(run.rank_statuses()[1]["pid"]), signal.SIGSTOP)
    last = end_of(process, run, code=3)
    assert "run stalled: rank 1 gave no sign of life for" in last
    assert run.status()["state"] == "stalled"


def test_scancel_from_outside(on_cluster: Cli, cluster: Cluster) -> None:
    process, run, job = started(on_cluster, "hosts=2", "ranks=2")
    cluster("scancel", job)
    last = end_of(process, run, code=3)
    assert f"run failed: Slurm job {job} was cancelled (scancel)" in last
    assert run.status()["state"] == "failed"


def test_ctrl_c_cancels_the_job(on_cluster: Cli, cluster: Cluster) -> None:
    process, run, job = started(on_cluster, "hosts=2", "ranks=2")
    process.send_signal(signal.SIGINT)
    assert "stopped; what was measured is in" in end_of(process, run, code=130)
    assert run.status()["state"] == "cancelled"
    assert "JobState=CANCELLED" in cluster("scontrol", "-o", "show", "job", job).stdout


def test_a_job_is_left_and_followed_from_elsewhere(on_cluster: Cli, cluster: Cluster, alone: dict[str, Any]) -> None:
    left = on_cluster("run", *SHORT, *ON_SLURM, "hosts=2", "ranks=2", "--name", "left", "--detach")
    assert left.returncode == 0, left.stderr
    assert not left.stdout
    job = (read_json(on_cluster.runs / "left" / "job.json") or {})["job"]
    assert left.stderr.strip().splitlines()[-1] == (
        f"Slurm job {job} goes on; go back to it: lockstep follow left; end it: scancel {job}"
    )
    followed = on_cluster("follow", "left", "--json")
    assert followed.returncode == 0, followed.stderr
    assert_same_as_alone(json.loads(followed.stdout), alone)
    again = on_cluster("follow", "left")  # it is over: the results at once
    assert again.returncode == 0
    assert "test accuracy" in again.stdout


def test_closing_the_terminal_does_not_cancel_the_job(on_cluster: Cli, cluster: Cluster) -> None:
    process, run, job = started(on_cluster, "hosts=2", "ranks=2")
    process.send_signal(signal.SIGHUP)
    _, errors = process.communicate(timeout=40)
    assert process.returncode == 129, errors
    assert f"Slurm job {job} goes on" in errors
    assert "JobState=RUNNING" in cluster("scontrol", "-o", "show", "job", job).stdout
    # Whoever stops following does not stop it either …
    following = on_cluster.start("follow", run.id)
    assert following.stderr
    wait_for(lambda: following.poll() is not None or "epoch" in following.stderr.readline(), what="progress")
    following.send_signal(signal.SIGINT)
    _, errors = following.communicate(timeout=40)
    assert following.returncode == 130, errors
    assert "no longer following" in errors
    assert "JobState=RUNNING" in cluster("scontrol", "-o", "show", "job", job).stdout
    # … and who follows a job that was cancelled meanwhile is told.
    cluster("scancel", job)
    cancelled = on_cluster("follow", run.id)
    assert cancelled.returncode == 3
    assert f"Slurm job {job} was cancelled (scancel)" in cancelled.stderr.strip().splitlines()[-1]
    assert run.status()["state"] == "failed"


ONCE_MORE = (*SHORT, "epochs=60", *ON_SLURM, "hosts=2", "ranks=2", "slurm.requeue=true", "slurm.grace=50")


@pytest.fixture(scope="module")
def undisturbed(module_cli: Cli) -> dict[str, torch.Tensor]:
    """The weights of the same training, which nobody interrupts."""
    document = module_cli.run(*SHORT, "epochs=60", "threads=1", "ranks=2", "strategy=ddp")
    weights: dict[str, torch.Tensor] = torch.load(Path(document["run"]) / "model.pt", weights_only=True)
    return weights


def by_scontrol(cluster: Cluster, job: str) -> None:
    cluster("scontrol", "requeue", job)


def by_an_urgent_job(cluster: Cluster, job: str) -> None:
    cluster("srun", "--partition=urgent", "-N2", "--ntasks-per-node=1", "--cpus-per-task=2", "--exclusive", "true")


def by_usr1(cluster: Cluster, job: str) -> None:
    """What Slurm sends `slurm.grace` seconds ahead of the time limit; then the job's script asks for another turn."""
    cluster("scancel", "--signal=USR1", job)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("interrupt", [by_scontrol, by_an_urgent_job, by_usr1])
def test_a_job_that_gives_way_goes_on_as_the_same_run_with_the_same_bits(
    on_cluster: Cli,
    cluster: Cluster,
    undisturbed: dict[str, torch.Tensor],
    interrupt: Callable[[Cluster, str], None],
) -> None:
    left = on_cluster("run", *ONCE_MORE, "--name", "again", "--detach", "--checkpoint-every", "1000")
    assert left.returncode == 0, left.stderr
    run = Run(on_cluster.runs / "again")
    job = str((read_json(run.folder / "job.json") or {})["job"])
    steps = lambda: len(read_steps(run.rank_folder(1) / "steps.bin"))  # noqa: E731
    wait_for(lambda: steps() > 30, seconds=60, what="steps")
    interrupt(cluster, job)
    wait_for(lambda: list((run.folder / "checkpoints").glob("*.json")), seconds=60, what="a checkpoint")
    followed = on_cluster("follow", "again", "--json")
    assert followed.returncode == 0, followed.stderr
    document = json.loads(followed.stdout)
    assert "Restarts=1" in cluster("scontrol", "-o", "show", "job", job).stdout
    assert document["ranks_agree"]
    assert [record["epoch"] for record in run.epochs()] == list(range(1, 61))
    assert steps() == run.spec().plan.total_steps
    for name, tensor in torch.load(run.folder / "model.pt", weights_only=True).items():
        assert torch.equal(tensor, undisturbed[name]), name


@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGUSR1])
def test_a_rank_that_is_told_to_leave_while_it_starts_keeps_a_checkpoint(tmp_path: Path, asked: signal.Signals) -> None:
    words = [*SHORT, *ON_SLURM, "slurm.requeue=true", "ranks=1", "epochs=100000"]
    run, _ = prepare(*load([], words), runs=tmp_path)
    place = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "SLURM_NTASKS_PER_NODE": "1"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    monitor = subprocess.Popen(monitor_argv(run.folder), env={**os.environ, **place})
    children = Path(f"/proc/{monitor.pid}/task/{monitor.pid}/children")
    wait_for(lambda: monitor.poll() is not None or children.read_text(), what="the rank's process")
    monitor.send_signal(asked)  # it has not yet imported torch
    assert monitor.wait(timeout=60) == 0, (run.rank_folder(0) / "log.txt").read_text()
    assert (run.folder / QUEUE_AGAIN).exists()
    assert checkpoints_in(run.folder / CHECKPOINTS)
    assert run.recorded_status()["state"] == "starting"


REFUSES = (
    'scontrol() { if [ "$1" = requeue ]; then echo "requeue is disabled" >&2; return 1; fi; command scontrol "$@"; }'
)


def test_a_job_that_cannot_be_queued_again_says_where_its_checkpoint_is(on_cluster: Cli, cluster: Cluster) -> None:
    words = ("slurm.requeue=true", f"slurm.setup={json.dumps([REFUSES])}")
    process, run, job = started(on_cluster, "hosts=2", "ranks=2", *words)
    by_usr1(cluster, job)
    said = end_of(process, run, code=3)
    assert f"run failed: Slurm job {job} gave way and did not come back (requeue is disabled): go on from its" in said
    assert f"checkpoint: lockstep run --resume {run.id};" in said
    assert checkpoints_in(run.folder / CHECKPOINTS)


@pytest.mark.parametrize("gives_way", [True, False])
def test_a_job_between_two_turns_is_not_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gives_way: bool) -> None:
    """Whether one run is followed or a study has many: as Slurm says, and a while after it has begun to end."""
    turns = ["RUNNING", "COMPLETING", "COMPLETING", "PENDING", "RUNNING", "COMPLETED"]
    seconds = iter([0.0, 1.0, 100.0, 101.0, 102.0, 103.0])
    monkeypatch.setattr(slurm, "state", lambda job: slurm.JobState(turns.pop(0)))
    monkeypatch.setattr(slurm, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    spec = spec_of(Placement(launcher="slurm", slurm=Slurm(requeue=gives_way)))
    watch = slurm.JobWatch(Run.create(tmp_path, spec), spec, "7")
    over = [watch.ask() for _ in range(6)]
    assert over == [False, False, not gives_way, False, False, True]


def test_a_rank_of_the_turn_before_does_not_stand_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(Placement(launcher="slurm", timeout_s=8, slurm=Slurm(requeue=True)))
    run = Run.create(tmp_path, spec)
    beat, sign = run.rank_folder(0) / "status.json", {"rank": 0, "pid": os.getpid(), "state": "running", "time": 1.0}
    write_atomic(beat, sign)
    now, name = [0.0], ["RUNNING"]
    monkeypatch.setattr(slurm, "state", lambda job: slurm.JobState(name[0]))
    monkeypatch.setattr(slurm, "time", SimpleNamespace(monotonic=lambda: now[0]))
    watch = slurm.JobWatch(run, spec, "7")

    def look(at: float, state: str) -> None:
        now[0], name[0] = at, state
        watch.ask()
        watch.check()

    look(0, "RUNNING")
    look(2, "COMPLETING")
    beat.unlink()  # as the script does when the job has its next turn, in which no rank has reported yet
    for second in range(4, 16, 2):
        look(second, "RUNNING")
    write_atomic(beat, sign | {"time": 2.0})
    look(16, "RUNNING")
    look(18, "RUNNING")
    look(20, "RUNNING")
    with pytest.raises(Stalled, match="rank 0 gave no sign of life for 5 s"):
        look(21, "RUNNING")


def test_the_ranks_of_a_job_are_read_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a thousand ranks that is a thousand small files on a file server."""
    spec = spec_of(Placement(launcher="slurm", ranks=2))
    run = Run.create(tmp_path, spec)
    for rank in range(2):
        sign = {"rank": rank, "pid": os.getpid(), "state": "running", "time": 1.0}
        write_atomic(run.rank_folder(rank) / "status.json", sign)
    began, reads = time.monotonic(), []
    read = Run.rank_statuses
    monkeypatch.setattr(Run, "rank_statuses", lambda self: (reads.append(1), read(self))[1])
    over = lambda job: slurm.JobState("COMPLETED" if time.monotonic() - began > 1.5 else "RUNNING")  # noqa: E731
    monkeypatch.setattr(slurm, "state", over)
    ended = slurm._watch(run, spec, "7", FolderWatch(run), None)
    assert ended.name == "COMPLETED"
    assert 1 <= len(reads) <= time.monotonic() - began + 1


@pytest.mark.skipif("LOCKSTEP_SLOW_TESTS" not in os.environ, reason="takes 2 minutes: set LOCKSTEP_SLOW_TESTS=1")
@pytest.mark.timeout(400)
def test_ahead_of_its_time_limit_a_job_queues_again(on_cluster: Cli, cluster: Cluster) -> None:
    left = on_cluster(
        "run", *ENDLESS, "slurm.requeue=true", "slurm.grace=50", "slurm.time=00:01:00", "--name", "again", "--detach"
    )
    assert left.returncode == 0, left.stderr
    run = Run(on_cluster.runs / "again")
    job = str((read_json(run.folder / "job.json") or {})["job"])
    wait_for(
        lambda: "Restarts=1" in cluster("scontrol", "-o", "show", "job", job).stdout, seconds=120, what="a second turn"
    )
    wait_for(lambda: run.recorded_status()["state"] == "running", seconds=120, what="its ranks")
    cluster("scancel", job)
    assert on_cluster("follow", "again").returncode == 3


def test_what_cannot_give_way_is_refused(cli: Cli) -> None:
    done = cli("run", *SHORT, *ON_SLURM, "slurm.requeue=true", "slurm.ranks_by=torchrun")
    assert done.returncode == 2
    assert "torchrun ends its ranks before they can keep a checkpoint: slurm.ranks_by=srun" in done.stderr
    if shutil.which("srun"):
        cli.environment |= {"SLURM_JOB_ID": "7"}
        inside = cli("run", *SHORT, *ON_SLURM, "slurm.requeue=true")
        assert inside.returncode == 2
        assert "this is inside Slurm job 7, which is not ours to queue again" in inside.stderr


def test_what_sbatch_refuses_is_no_run_that_was_left(on_cluster: Cli) -> None:
    done = on_cluster("run", *SHORT, *ON_SLURM, "slurm.partition=nope", "--detach")
    assert done.returncode == 2
    assert "change slurm.partition" in done.stderr
    assert not list(on_cluster.runs.glob("*"))


def test_a_dry_run_prints_the_script(cli: Cli) -> None:
    done = cli("run", *SHORT, *ON_SLURM, "hosts=2", "ranks=2", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --nodes=2" in done.stdout
    assert "exec srun" in done.stdout
    assert not list(cli.runs.glob("*"))


def test_what_ends_with_its_command_cannot_be_left(cli: Cli) -> None:
    done = cli("run", *SHORT, "--detach")
    assert done.returncode == 2
    assert "--detach: launcher=single ends with this command" in done.stderr
    assert not list(cli.runs.glob("*"))
    cli.environment |= {"SLURM_JOB_ID": "7"}
    inside = cli("run", *SHORT, *ON_SLURM, "--detach")
    assert inside.returncode == 2
    assert "--detach: this is inside Slurm job 7" in inside.stderr


def test_a_queued_job_says_why_and_can_be_stopped(on_cluster: Cli, cluster: Cluster) -> None:
    process = on_cluster.start("run", *ENDLESS, "hosts=2", "ranks=2", 'slurm.directives=["--hold"]')
    assert process.stderr
    lines = iter(process.stderr.readline, "")
    line = next(line for line in lines if "Slurm job" in line)
    assert re.match(r"Slurm job \d+: pending \(JobHeldUser\), \d+ s so far", line), line
    run = Run.find("last", on_cluster.runs)
    assert run.status()["state"] == "starting"
    process.send_signal(signal.SIGTERM)  # the same as Ctrl-C
    assert "stopped" in end_of(process, run, code=130)
    job = run.folder / "job.json"
    assert "JobState=CANCELLED" in cluster("scontrol", "-o", "show", "job", (read_json(job) or {})["job"]).stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("slurm.partition=nope",), r"nvalid partition name specified; change slurm.partition"),
        (("hosts=3", "ranks=3"), r"Node count specification invalid; change hosts, ranks or threads"),
        (("slurm.gres=gpu:1",), r"nvalid generic resource \(gres\) specification; change slurm.gres"),
    ],
)
def test_what_sbatch_refuses_is_one_line(on_cluster: Cli, words: tuple[str, ...], expected: str) -> None:
    message = on_cluster.error("run", *SHORT, *ON_SLURM, *words, code=2)
    assert re.match(r"sbatch refused the job: .*" + expected, message), message
    assert not list_runs(on_cluster.runs), "wrong input leaves no run"


def test_a_script_that_fails_before_the_ranks(on_cluster: Cli) -> None:
    message = on_cluster.error("run", *SHORT, *ON_SLURM, 'slurm.setup=["module load nothing"]', code=3)
    assert re.search(
        r"Slurm job \d+ ended as FAILED \(NonZeroExitCode, exit code 127:0\): .*module: command not found", message
    )


def test_a_job_that_the_controller_has_forgotten(on_cluster: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", on_cluster.environment["SLURM_CONF"])
    assert slurm.state("999999").name == "VANISHED"
    run = Run.create(on_cluster.runs, spec_of(Placement(launcher="slurm")))
    with pytest.raises(slurm.RunFailed, match="Slurm job 999999 is no longer known to Slurm, and no rank says"):
        slurm.conclude(run, "999999", slurm.state("999999"))
    run.write_status("done")
    slurm.conclude(run, "999999", slurm.state("999999"))


def test_a_node_that_dies(on_cluster: Cli, cluster: Cluster) -> None:
    process, run, job = started(on_cluster, "hosts=2", "ranks=2")
    cluster.kill_node("node2")
    died = time.monotonic()
    try:
        last = end_of(process, run, code=3)
    finally:
        cluster.start_node("node2")
    assert time.monotonic() - died < 40
    assert f"run failed: Slurm job {job} lost a node" in last
    assert run.status()["state"] == "failed"


@pytest.mark.slow
@pytest.mark.skipif("LOCKSTEP_SLOW_TESTS" not in os.environ, reason="takes 30 s: set LOCKSTEP_SLOW_TESTS=1")
def test_a_time_limit(on_cluster: Cli, cluster: Cluster) -> None:
    """Slurm looks at time limits every 30 s."""
    process, run, job = started(on_cluster, "ranks=1", "slurm.time=00:10:00")
    cluster("scontrol", "update", f"JobId={job}", "EndTime=now+1")
    last = end_of(process, run, code=3)
    assert f"run failed: Slurm job {job} reached its time limit: give it more with slurm.time" in last
    assert run.status()["state"] == "failed"
