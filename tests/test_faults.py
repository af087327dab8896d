"""Real faults in real processes: a killed rank, Ctrl-C, a killed supervisor, a full disk, a port that is taken."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import ray_cluster
from lockstep.measure.records import read_steps
from lockstep.run import Run
from support import SHORT, Cli, faulty_net, fill, processes_of, removed_from_under, wait_for

pytestmark = pytest.mark.cold  # it is about processes: which one was killed, and who is left

LONG = (*SHORT, "epochs=100000", "threads=1")
NEEDS_RAY = pytest.mark.skipif(ray_cluster.missing() is not None, reason=str(ray_cluster.missing()))


def started(cli: Cli, *words: str) -> tuple[subprocess.Popen[str], Run]:
    return cli.started(*LONG, *words)


def rank_pid(run: Run, rank: int) -> int:
    return int(run.rank_statuses()[rank]["pid"])


@pytest.mark.parametrize("launcher", ["spawn", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_kill_9_of_one_rank_ends_all_and_names_it(cli: Cli, launcher: str) -> None:
    process, run = started(cli, "ranks=2", "strategy=ddp", f"launcher={launcher}")
    before = len(read_steps(run.rank_folder(1) / "steps.bin"))
    os.kill(rank_pid(run, 1), signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 3, errors
    assert "Traceback" not in errors
    last = errors.strip().splitlines()[-1]
    assert re.match(r"lockstep: run failed: rank 1 was killed by SIGKILL after step \d+", last), last
    wait_for(lambda: not processes_of(run.folder), seconds=5, what="every process to be gone")
    status = run.status()
    assert (status["state"], status["rank"], status["signal"]) == ("failed", 1, "SIGKILL")
    # What was measured is there, to the last step before the kill.
    rows = read_steps(run.rank_folder(1) / "steps.bin")
    assert len(rows) >= before
    assert rows["step"].tolist() == list(range(1, len(rows) + 1))
    shown = cli("show", run.id)
    assert shown.returncode == 0
    assert "killed by SIGKILL" in shown.stdout
    assert cli("runs").stdout.count("failed") == 1


def test_ctrl_c_stops_every_rank_and_keeps_what_was_measured(cli: Cli) -> None:
    process, run = started(cli, "ranks=2")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "stopped; what was measured is in" in errors
    wait_for(lambda: not processes_of(run.folder), seconds=5, what="every process to be gone")
    assert run.status()["state"] == "cancelled"
    assert len(read_steps(run.rank_folder(0) / "steps.bin")) > 20


@pytest.mark.parametrize("launcher", ["spawn", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_a_killed_supervisor_leaves_no_rank_behind(cli: Cli, launcher: str) -> None:
    process, run = started(cli, "ranks=2", f"launcher={launcher}")
    process.kill()
    process.communicate(timeout=10)
    wait_for(lambda: not processes_of(run.folder), seconds=10, what="every rank to follow its supervisor")
    assert run.recorded_status()["state"] == "running", "nobody was left to write it"
    assert run.status()["state"] == "failed"
    assert "is gone" in run.status()["cause"]


def test_an_exception_in_one_rank_is_the_first_cause(cli: Cli) -> None:
    (cli.folder / "net.py").write_text(faulty_net("raise ArithmeticError('the planted fault')"))
    message = cli.error("run", *SHORT, "ranks=2", "model=net.py:Net", code=3)
    assert message.startswith("run failed: rank 1 after step 5: ArithmeticError: the planted fault")
    run = Run.find("last", cli.runs)
    assert "ArithmeticError: the planted fault" in (run.rank_folder(1) / "log.txt").read_text(), (
        "the traceback is in the log"
    )


def test_a_rank_that_hangs_ends_the_run_by_the_timeout(cli: Cli) -> None:
    (cli.folder / "net.py").write_text(faulty_net("time.sleep(1000)"))
    message = cli.error("run", *SHORT, "ranks=2", "timeout_s=3", "model=net.py:Net", code=3)
    assert "rank 1 did not come to the exchange after step 5" in message
    assert not processes_of(cli.runs)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["spawn", "torchrun", "mpirun", pytest.param("ray", marks=NEEDS_RAY)])
def test_a_stopped_rank_is_noticed_and_named(cli: Cli, launcher: str) -> None:
    process, run = started(cli, "ranks=2", "strategy=ddp", "timeout_s=8", f"launcher={launcher}")
    pid = rank_pid(run, 1)
    os.kill(pid, signal.SIGSTOP)
    try:
        _, errors = process.communicate(timeout=30)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    assert process.returncode == 3, errors
    assert "run stalled: rank 1 gave no sign of life for" in errors
    assert "(its process is stopped)" in errors
    assert run.status()["state"] == "stalled"
    wait_for(lambda: not processes_of(run.folder), seconds=5, what="every process to be gone")


@pytest.mark.slow
def test_a_run_that_was_frozen_as_a_whole_goes_on(cli: Cli) -> None:
    """Ctrl-Z, a frozen container, a machine that was suspended: the supervisor wakes first, and must not blame the others."""
    process, run = started(cli, "ranks=2", "backend=shm", "timeout_s=8")
    ranks = [rank_pid(run, rank) for rank in (0, 1)]
    try:
        for pid in (process.pid, *ranks):
            os.kill(pid, signal.SIGSTOP)
        before = len(read_steps(run.rank_folder(0) / "steps.bin"))
        time.sleep(10)
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(1.5)
    finally:
        for pid in (process.pid, *ranks):
            os.kill(pid, signal.SIGCONT)
    wait_for(lambda: len(read_steps(run.rank_folder(0) / "steps.bin")) > before + 20, what="more steps")
    assert run.status()["state"] == "running"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)


@pytest.mark.slow
def test_kill_9_of_the_torchrun_agent_leaves_no_rank_training(cli: Cli) -> None:
    process, run = started(cli, "ranks=2", "launcher=torchrun")
    agent = int(Path(f"/proc/{rank_pid(run, 1)}/stat").read_text().rpartition(")")[2].split()[1])
    assert agent != process.pid
    os.kill(agent, signal.SIGKILL)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 3, errors
    wait_for(lambda: not processes_of(run.folder), seconds=5, what="every orphan to be gone")
    assert run.status()["state"] == "failed"
    killed = (
        rf"lockstep: run failed: torchrun's agent \(process {agent}\) was killed by SIGKILL after step \d+ \(by hand, "
    )
    assert re.match(killed, errors.strip().splitlines()[-1]), errors
    assert run.status()["signal"] == "SIGKILL"
    assert len(read_steps(run.rank_folder(1) / "steps.bin")) > 20


@pytest.mark.slow
def test_torchrun_restarts_from_the_last_epoch(cli: Cli) -> None:
    """One rank is killed once, in the second epoch; the run goes on and ends with the weights of one that was not."""
    once = "self.calls == 20 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and 'PLANT' in os.environ"
    (cli.folder / "net.py").write_text(faulty_net("os.kill(os.getpid(), signal.SIGKILL)", once))
    words = ("run", *SHORT, "model=net.py:Net", "ranks=2", "threads=1", "launcher=torchrun", "epochs=3", "--json")
    broken = cli(*words, "max_restarts=1", PLANT="1")
    assert broken.returncode == 0, broken.stderr
    whole = json.loads(cli(*words).stdout)
    restarted = json.loads(broken.stdout)
    assert restarted["weights_sha256"] == whole["weights_sha256"], "bit for bit the run that was not interrupted"
    assert [e["epoch"] for e in restarted["epochs"]] == [1, 2, 3]
    assert [e["train_loss"] for e in restarted["epochs"]] == [e["train_loss"] for e in whole["epochs"]]
    rows = read_steps(Path(restarted["run"]) / "ranks" / "0000" / "steps.bin")
    assert rows["step"].tolist() == list(range(1, 46))
    failed = cli(*words, "max_restarts=0", PLANT="1")
    assert failed.returncode == 3, "the planted fault is real"


def test_a_port_that_is_taken(cli: Cli) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        message = cli.error("run", *SHORT, "ranks=2", "launcher=torchrun", f"rendezvous={address}", code=2)
    assert f"rendezvous={address} cannot be used: Address already in use; choose another port" in message
    assert not cli.runs.exists()


def test_a_run_folder_that_cannot_be_made(cli: Cli) -> None:
    (cli.folder / "file").write_text("in the way")
    message = cli.error("run", *SHORT, "--runs", "file", code=2)
    assert "cannot write the run folder" in message
    assert "--runs" in message


def test_no_room_for_the_run(cli: Cli, small_disk: Path) -> None:
    """100,000 epochs of steps need more than 8 MB of records: said before the first step, not by a crash later."""
    message = cli.error("run", *LONG, "--runs", str(small_disk), code=2)
    assert "no room for the run" in message
    fill(small_disk)
    message = cli.error("run", *SHORT, "--runs", str(small_disk), code=2)
    assert "no room for the run" in message


LAUNCHERS = [
    ("ranks=1", "launcher=single"),
    ("ranks=2", "launcher=spawn", "strategy=ddp"),
    pytest.param(("ranks=2", "launcher=torchrun"), marks=pytest.mark.slow),
    pytest.param(("ranks=2", "launcher=mpirun"), marks=pytest.mark.slow),
    pytest.param(("ranks=2", "launcher=ray"), marks=[pytest.mark.slow, NEEDS_RAY]),
]


@pytest.mark.parametrize("words", LAUNCHERS, ids=lambda words: words[1])
def test_a_disk_that_fills_up_in_mid_run(cli: Cli, small_disk: Path, words: tuple[str, ...]) -> None:
    """One line with the true cause, in the terminal and in the folder; what was measured is kept."""
    cli.runs = small_disk
    cli.environment["LOCKSTEP_RUNS"] = str(small_disk)
    # Records of 1,000 epochs take 1.4 MB a rank.
    process, run = started(cli, "epochs=1000", *words)
    fill(small_disk)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 3, errors
    assert "Traceback" not in errors
    said = errors.strip().splitlines()[-1]
    expected = rf"lockstep: run failed: rank \d after step \d+: no room for the run in {small_disk}: free some space"
    assert re.match(expected, said), errors
    status = run.recorded_status()
    assert status["state"] == "failed"
    assert f"run failed: {status['cause']}; " in said
    assert all(len(read_steps(run.rank_folder(rank) / "steps.bin")) > 20 for rank in range(run.spec().plan.ranks))
    wait_for(lambda: not processes_of(run.folder), what="every process to be gone")
    assert "no room for the run" in cli("show", run.id).stdout


@pytest.mark.parametrize("words", LAUNCHERS, ids=lambda words: words[1])
def test_a_run_folder_that_is_removed_in_mid_run(cli: Cli, words: tuple[str, ...]) -> None:
    process, run = started(cli, *words)
    removed_from_under(run.folder)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 3, errors
    removed = f"lockstep: run failed: the run folder {run.folder} was removed while the run was under way"
    assert errors.strip().splitlines()[-1] == removed
    assert "Traceback" not in errors
    wait_for(lambda: not processes_of(run.folder), what="every process to be gone")
    assert not run.folder.exists()


@pytest.mark.slow
def test_kill_9_of_mpirun_names_it(cli: Cli) -> None:
    process, run = started(cli, "ranks=2", "launcher=mpirun")
    (launcher,) = children(process.pid)
    os.kill(launcher, signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 3, errors
    killed = rf"lockstep: run failed: mpirun \(process {launcher}\) was killed by SIGKILL after step \d+"
    assert re.match(killed, errors.strip().splitlines()[-1]), errors
    wait_for(lambda: not processes_of(run.folder), what="every orphan to be gone")


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_reader_that_goes_away_does_not_end_the_run(cli: Cli) -> None:
    """`lockstep run … 2>&1 | head -n 1`"""
    with subprocess.Popen(
        cli.argv("run", *SHORT), env=cli.environment, cwd=cli.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(100) == 0
    run = Run.find("last", cli.runs)
    assert run.status()["state"] == "done"
    assert len(run.epochs()) == 2


@pytest.mark.cold
@pytest.mark.parametrize(
    ("module", "interrupt"),
    [
        ("click", "interrupt()"),
        ("lockstep.errors", "interrupt()"),
        ("msgspec", "interrupt()"),
        ("click", "Dropped()"),
        ("lockstep.errors", "Dropped()"),
        ("lockstep.placement", "type('Owner', (), {'attribute': Named()})"),
    ],
)
def test_ctrl_c_while_modules_are_imported_is_one_line(cli: Cli, module: str, interrupt: str) -> None:
    """Right after the start. The interrupt comes from the import of that module, so that it comes at that moment; also within a
    callback, as importlib has them, where Python prints an exception and goes on, and while a class is made, where it is wrapped."""
    (cli.folder / "early.py").write_text(
        "import os, signal, sys\n"
        "def interrupt(*ignored): os.kill(os.getpid(), signal.SIGINT)\n"
        "class Dropped: __del__ = interrupt\n"
        "class Named: __set_name__ = interrupt\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}: {interrupt}\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from lockstep.cli import main\nmain()\n"
    )
    argv = [sys.executable, "early.py", "run", *SHORT, "--dry-run"]
    result = subprocess.run(argv, env=cli.environment, cwd=cli.folder, capture_output=True, text=True)
    # click ends the line on which the terminal shows ^C
    assert (result.returncode, result.stderr.lstrip("\n")) == (130, "lockstep: stopped\n")


@pytest.mark.cold
@pytest.mark.slow
def test_ctrl_c_at_any_moment_of_the_start_is_one_line(cli: Cli) -> None:
    """Real processes, each interrupted a little later. Until Python and pip's script have come to `main` nobody can catch it."""
    seen: Counter[str] = Counter()
    for delay in range(60):
        argv = cli.argv("models")
        process = subprocess.Popen(argv, env=cli.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        time.sleep(delay / 200)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
        assert not re.search(r"lockstep/cli/.*, in ", said), said
        where = "before main" if "Traceback" in said else "stopped" if said else "silent"
        seen[where] += 1
        if where == "stopped":
            assert said.splitlines()[-1] == "lockstep: stopped"
            assert process.returncode == 130, said
    assert seen["stopped"] > 10, seen


@pytest.mark.slow
def test_two_hosts_on_this_machine_by_the_commands_that_dry_run_prints(cli: Cli, alone: dict[str, Any]) -> None:
    """Each "host" runs the command that --dry-run printed for it; they meet over loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    words = (*SHORT, "ranks=2", "hosts=2", "threads=1", f"rendezvous={address}")
    plan = json.loads(cli("run", *words, "--dry-run", "--json").stdout)
    assert len(plan["host_commands"]) == 2
    assert not cli.runs.exists(), "a dry run leaves nothing behind"
    binary = cli.argv()[0]
    environment = {**cli.environment, "GLOO_SOCKET_IFNAME": "lo"}
    hosts = [
        subprocess.Popen(
            ["bash", "-c", command.replace("lockstep", binary, 1)],
            cwd=cli.folder,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command in plan["host_commands"]
    ]
    outputs = [host.communicate(timeout=100)[1] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], outputs
    run = Run.find("last", cli.runs)
    summary = run.summary()
    assert summary
    assert summary["ranks_agree"]
    assert run.status()["state"] == "done"
    assert summary["train_loss"] == pytest.approx(alone["train_loss"], rel=1e-5)


def test_several_hosts_need_their_own_commands(cli: Cli) -> None:
    message = cli.error("run", *SHORT, "ranks=2", "hosts=2", "rendezvous=127.0.0.1:29500", code=2)
    assert "--host-index" in message
    assert "--dry-run" in message
