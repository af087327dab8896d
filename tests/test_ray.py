"""Ray as a launcher: real Ray, one of our own and a cluster of two nodes; who is named, what is left, what is refused."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from lockstep.errors import InputError
from lockstep.launch.launchers import starts_of
from lockstep.launch.ray import driver
from lockstep.launch.specification import specify
from lockstep.measure.records import read_steps
from lockstep.run import Run
from lockstep.settings import load
from ray_cluster import Cluster, cluster, missing
from support import SHORT, Cli, faulty_net, processes_of, wait_for
from test_cli import GOLDEN, normalised
from test_hang import OTHERS, Desync, judge

pytestmark = pytest.mark.cold
REAL = [pytest.mark.slow, pytest.mark.skipif(missing() is not None, reason=str(missing()))]
TWO = ("ranks=2", "launcher=ray")
LONG = (*SHORT, "epochs=100000", *TWO)
START_S = 150.0


def real(test: object) -> object:
    for mark in REAL:
        test = mark(test)
    return test


def started(cli: Cli, *words: str) -> tuple[object, Run]:
    process = cli.start("run", *LONG, *words)
    run = wait_for(lambda: next((Run(p.parent) for p in cli.runs.glob("*/run.json")), None), what="the run folder")
    rows = [run.rank_folder(rank) / "steps.bin" for rank in (0, 1)]
    wait_for(lambda: all(p.exists() and len(read_steps(p)) > 20 for p in rows), START_S, "steps on every rank")
    wait_for(lambda: len(run.rank_statuses()) == 2, what="signs of life")
    return process, run


@pytest.fixture(autouse=True)
def rays(cli: Cli) -> Iterator[Path]:
    """A folder for the Rays of one test, by a name that is short enough for their sockets: other tests start some at the same time."""
    with tempfile.TemporaryDirectory(prefix="r") as folder:
        cli.environment["TMPDIR"] = folder
        yield Path(folder)


def of_ray(rays: Path) -> list[int]:
    """Processes of a Ray that Lockstep has started, and which must be gone with its run."""
    return processes_of(rays / driver.FOLDER)


def listening(pids: list[int]) -> set[str]:
    """The addresses at which these processes accept TCP connections."""
    sockets = set()
    for end in (end for pid in pids for end in Path(f"/proc/{pid}/fd").iterdir()):
        with suppress(FileNotFoundError):  # closed meanwhile
            sockets.add(str(end.readlink()))
    found = set()
    for table, width in (("tcp", 8), ("tcp6", 32)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                words = bytes.fromhex(fields[1].partition(":")[0])
                # The kernel writes each word of four bytes in this machine's order.
                ordered = b"".join(words[at : at + 4][::-1] for at in range(0, width // 2, 4))
                address = ipaddress.ip_address(ordered)
                found.add(str(getattr(address, "ipv4_mapped", None) or address))
    return found


def nothing_left(run: Run, rays: Path) -> None:
    wait_for(lambda: not processes_of(run.folder), 20, "every process of the run to be gone")
    wait_for(lambda: not of_ray(rays), 20, "every process of Ray to be gone")


@real
def test_two_ranks_compute_what_spawn_computes_and_leave_nothing(cli: Cli, rays: Path) -> None:
    found = json.loads(cli("run", *SHORT, *TWO, "--json", timeout=240).stdout)
    assert found["state"] == "done"
    plain = cli.run(*SHORT, "ranks=2", "launcher=spawn")
    assert found["weights_sha256"] == plain["weights_sha256"]
    run = Run(Path(found["run"]))
    assert all((run.rank_folder(rank) / "log.txt").exists() for rank in (0, 1))
    nothing_left(run, rays)
    assert not list(rays.glob(f"{driver.FOLDER}*"))


@real
def test_a_killed_rank_is_named_and_all_is_ended(cli: Cli, rays: Path) -> None:
    process, run = started(cli)
    addresses = listening(of_ray(rays))
    assert addresses, "Ray listens somewhere"
    assert {address for address in addresses if not ipaddress.ip_address(address).is_loopback} == set()
    os.kill(int(run.rank_statuses()[1]["pid"]), signal.SIGKILL)
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 3, errors
    last = errors.strip().splitlines()[-1]
    assert re.match(r"lockstep: run failed: rank 1 was killed by SIGKILL after step \d+", last), last
    assert (run.status()["rank"], run.status()["signal"]) == (1, "SIGKILL")
    nothing_left(run, rays)


@real
def test_an_exception_in_one_rank_is_the_first_cause(cli: Cli) -> None:
    (cli.folder / "net.py").write_text(faulty_net("raise ArithmeticError('the planted fault')"))
    result = cli("run", *SHORT, *TWO, "model=net.py:Net", timeout=240)
    assert result.returncode == 3, result.stderr
    said = result.stderr.strip().splitlines()[-1]
    assert said.startswith(
        "lockstep: run failed: rank 1 after step 5: ArithmeticError: the planted fault (net.py:9)"
    ), said


@real
def test_a_worker_of_ray_that_is_killed_is_told(cli: Cli, rays: Path) -> None:
    process, run = started(cli)
    monitor = parent(int(run.rank_statuses()[1]["pid"]))
    os.kill(parent(monitor), signal.SIGKILL)
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 3, errors
    assert run.status()["rank"] == 1, run.status()
    assert "Ray lost its process" in errors
    nothing_left(run, rays)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@real
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_ctrl_c_and_kill_9_leave_nothing_behind(cli: Cli, rays: Path, sign: signal.Signals) -> None:
    process, run = started(cli)
    process.send_signal(sign)
    _, errors = process.communicate(timeout=90)
    nothing_left(run, rays)
    if sign == signal.SIGINT:
        assert process.returncode == 130, errors
        assert run.status()["state"] == "cancelled"
    else:
        assert "is gone" in run.status()["cause"]
    wait_for(lambda: not list(rays.glob(f"{driver.FOLDER}*")), 20, "Ray's folder to be gone")


@real
def test_kill_9_of_the_driver_names_it(cli: Cli, rays: Path) -> None:
    process, run = started(cli)
    pid = next(pid for pid in processes_of(run.folder) if parent(pid) == process.pid)
    os.kill(pid, signal.SIGKILL)
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 3, errors
    assert re.search(rf"Ray's driver \(process {pid}\) was killed by SIGKILL after step \d+", errors), errors
    nothing_left(run, rays)


@real
@pytest.mark.parametrize("fault", OTHERS)
def test_who_falls_out_of_step_is_named(cli: Cli, fault: str) -> None:
    judge(Desync(cli, fault, *TWO, "backend=gloo"), fault)


# ---------------------------------------------------------------- a cluster that is there


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Cluster]:
    with cluster() as made:
        yield made


@real
def test_two_hosts_are_two_nodes_of_the_cluster(cli: Cli, two_nodes: Cluster) -> None:
    cli.environment |= two_nodes.environment
    words = (*SHORT, *TWO, f"ray.address={two_nodes.address}", "--json")
    result = cli("run", *words, "hosts=2", timeout=240)
    assert result.returncode == 0, result.stderr
    plain = cli.run(*SHORT, "ranks=2", "launcher=spawn")
    assert json.loads(result.stdout)["weights_sha256"] == plain["weights_sha256"]
    refused = cli("run", *words, "hosts=2", "threads=2", timeout=240)
    assert refused.returncode == 2, refused.stderr
    assert "hosts=2 with 2 cores each, but Ray has 0 such nodes" in refused.stderr
    assert len(list(cli.runs.glob("*/run.json"))) == 2, "what was refused was never a run"


@real
def test_ctrl_c_frees_the_cluster(cli: Cli, two_nodes: Cluster) -> None:
    cli.environment |= two_nodes.environment
    words = ("hosts=2", f"ray.address={two_nodes.address}")
    process, run = started(cli, *words)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 130, errors
    wait_for(lambda: not processes_of(run.folder), 20, "every process of the run to be gone")
    again = cli("run", *SHORT, *TWO, *words, timeout=240)
    assert again.returncode == 0, again.stderr


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["hosts=2"], "launcher=ray hosts=2 needs a Ray cluster: add ray.address=HOST:PORT"),
        (["ray.address=nowhere"], "ray.address='nowhere' is not HOST:PORT, for example ray.address=10.0.0.1:6379"),
        (["backend=mpi"], "backend=mpi needs ranks that MPI started, not launcher=ray"),
        (["max_restarts=1"], "max_restarts has no effect with launcher=ray"),
    ],
)
def test_what_cannot_be_is_one_line(words: list[str], said: str) -> None:
    with pytest.raises(InputError) as error:
        specify(*load([], [*SHORT, *TWO, *words]))
    assert said in str(error.value)


@real
def test_an_address_where_nobody_answers_is_one_line(cli: Cli) -> None:
    message = cli.error("run", *SHORT, *TWO, "ray.address=127.0.0.1:9", code=2)
    assert message.startswith("ray.address=127.0.0.1:9: no Ray cluster answers there: Connection refused")
    assert not list(cli.runs.glob("*/run.json"))


def test_without_ray_it_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, spec = specify(*load([], [*SHORT, *TWO]))
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        InputError, match=r"launcher=ray needs Ray, which is not installed: pip install 'lockstep-bench\[ray\]'"
    ):
        starts_of(spec, tmp_path, 0)


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_dry_run_against_golden_text(cli: Cli) -> None:
    result = cli("run", *SHORT, *TWO, "--dry-run")
    assert result.returncode == 0, result.stderr
    assert normalised(result.stdout, cli) == (GOLDEN / "dry-run-ray.txt").read_text()
    assert not cli.runs.exists()
