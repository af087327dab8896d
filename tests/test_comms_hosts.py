"""`lockstep comms` between hosts: emulated ones, and the nodes of a real Slurm; what is kept of it, and for whom."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.backends.costs import between, store
from lockstep.backends.costs.cells import Cell
from lockstep.launch.emulated import network as emulate
from lockstep.placement import Placement
from slurm_cluster import Cluster, with_mpich
from support import Cli, processes_of, wait_for

SHORT = ("--quick", "--collective", "all_reduce", "--collective", "barrier", "--rounds", "1", "--max-bytes", "17064")
emulated = pytest.mark.skipif(emulate.problem() is not None, reason=str(emulate.problem()))


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    result = Cli(tmp_path)
    result.environment["LOCKSTEP_DATA"] = str(tmp_path / "cache" / "data")
    return result


@pytest.fixture
def on_cluster(cluster: Cluster, cli: Cli) -> Iterator[Cli]:
    cli.environment |= cluster.environment
    yield cli
    wait_for(lambda: not processes_of(cli.folder), seconds=10, what="every process to be gone")
    wait_for(lambda: cluster.idle() == 2, seconds=10, what="both nodes to be idle again")


def measured(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    for cell in document["cells"]:
        assert (cell["state"], cell["reason"]) == ("ok", None), cell
        assert cell["n"] >= 3
    return document


def kept(cli: Cli) -> list[between.Measured]:
    return between.load(cli.folder / "cache" / "comms")


@emulated
@pytest.mark.slow
@pytest.mark.cold
@pytest.mark.parametrize("launcher", ["spawn", "torchrun"])
def test_emulated_hosts(cli: Cli, launcher: str) -> None:
    words = ("hosts=emulated:2", "link=1gbit,5ms", f"launcher={launcher}")
    document = measured(cli("comms", *words, *SHORT, "--out", "out", "--json"))
    smallest = next(cell for cell in document["cells"] if cell["bytes"] == 4)
    assert smallest["min_us"] > 10_000, "an all-reduce takes at least two delays"
    assert not processes_of(cli.folder / "out")
    # Kept apart from what backend=auto reads.
    assert not store.load(cli.folder / "cache" / "comms")
    assert document["choices"] == []
    one = kept(cli)[0]
    assert (one.kind, one.hosts, one.ranks) == ("emulated hosts, 1gbit,5ms", 2, 2)
    assert len(one.cells) == len(document["cells"])


@pytest.mark.slow
@pytest.mark.cold
def test_torchrun_and_mpirun_of_one_host(cli: Cli) -> None:
    document = measured(cli("comms", "launcher=torchrun", "backend=gloo", *SHORT, "--json"))
    assert {cell["backend"] for cell in document["cells"]} == {"gloo"}
    result = cli("comms", "launcher=mpirun", "backend=gloo", *SHORT, "--json")
    if "there is no mpirun" in result.stderr:
        pytest.skip(result.stderr)
    measured(result)
    assert {one.kind for one in kept(cli)} == {"torchrun", "mpirun"}


@pytest.mark.slow
@pytest.mark.cold
@pytest.mark.parametrize("by", ["srun", "torchrun", pytest.param("mpirun", marks=with_mpich)])
def test_in_an_allocation(on_cluster: Cli, by: str) -> None:
    words = ("hosts=2", "ranks=2", "threads=1", f"slurm.ranks_by={by}", *SHORT, "--json")
    result = subprocess.run(
        ["salloc", "--quiet", "-N2", *on_cluster.argv("comms", *words)],
        env=on_cluster.environment,
        cwd=on_cluster.folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    document = measured(result)
    assert document["on"] == " on 2 hosts (Slurm)"
    assert {cell["backend"] for cell in document["cells"]} == ({"gloo", "mpi"} if by == "mpirun" else {"gloo"})
    assert kept(on_cluster)[0].words == "hosts=2 ranks=2 launcher=slurm"
    assert not (on_cluster.folder / "runs").exists(), "the folder that the nodes shared is gone"


@pytest.mark.slow
@pytest.mark.cold
def test_as_a_job_of_its_own(on_cluster: Cli) -> None:
    words = ("launcher=slurm", "hosts=2", "ranks=4", "threads=1", "slurm.partition=test")
    measured(on_cluster("comms", *words, *SHORT, "--json"))
    assert kept(on_cluster)[0].kind == "Slurm, partition test"
    message = on_cluster.error("comms", *words[:-1], "slurm.partition=nowhere", *SHORT, code=2)
    assert "salloc refused the job: " in message
    assert "change slurm.partition" in message


@pytest.mark.slow
@pytest.mark.cold
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_whoever_stops_it_the_nodes_are_free(on_cluster: Cli, number: signal.Signals, code: int) -> None:
    words = ("launcher=slurm", "hosts=2", "ranks=2", "threads=1", "--rounds", "1000", "--out", "out")
    process = on_cluster.start("comms", *words)
    log = on_cluster.folder / "out"
    wait_for(lambda: len(list(log.glob("*/ranks/*/pid"))) == 2, what="both ranks to start")
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == code, errors
    assert not kept(on_cluster), "half a measurement is not kept"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model=mnist-convnet"], "model=mnist-convnet: comms trains nothing: leave it out; it takes launcher, hosts"),
        (["hosts=2"], "hosts=2: say how they are reached: launcher=slurm, or hosts=emulated:2"),
        (
            ["hosts=2", "launcher=torchrun"],
            "has a command on each host, and comms is one command: choose launcher=slurm",
        ),
        (["link=1gbit"], "link=1gbit needs emulated hosts: add hosts=emulated:2"),
        (
            ["hosts=2", "launcher=mpirun"],
            "launcher=mpirun stays on one host, not hosts=2: choose launcher=slurm slurm.ranks_by=mpirun",
        ),
        (["hosts=2", "ranks=3", "launcher=slurm"], "ranks=3 do not divide over hosts=2: choose ranks=2"),
        (["ranks=2", "--ranks", "2"], "ranks=2 and --ranks say the same twice"),
        (["launcher=torchrun", "backend=mpi"], "--backend mpi: it needs ranks that MPI started, not launcher=torchrun"),
        (
            ["launcher=slurm", "hosts=2", "ranks=2", "slurm.ranks_by=torchrun", "backend=mpi"],
            "not slurm.ranks_by=torchrun",
        ),
    ],
)
def test_wrong_words(cli: Cli, words: list[str], message: str) -> None:
    cli.environment.pop("SLURM_JOB_ID", None)
    assert message in cli.error("comms", *words, code=2)


@emulated
def test_wrong_links_and_backends(cli: Cli) -> None:
    assert "'fast' is neither a rate" in cli.error("comms", "hosts=emulated:2", "link=fast", code=2)
    assert "--backend shm: it shares the memory of one host" in cli.error(
        "comms", "hosts=emulated:2", "backend=shm", code=2
    )


def cell(size: int, microseconds: float, ranks: int = 2) -> Cell:
    return Cell(
        backend="gloo",
        device="cpu",
        ranks=ranks,
        collective="all_reduce",
        bytes=size,
        message_bytes=size,
        n=5,
        median_us=microseconds,
        time=size,
    )


def test_what_is_kept_by_kind(tmp_path: Path) -> None:
    slow = Placement(hosts=2, ranks=2, emulated=True, link="100mbit", launcher="spawn")
    cluster = Placement(hosts=2, ranks=2, launcher="slurm")
    between.save(slow, [cell(4, 10.0), cell(16, 20.0)], tmp_path)
    between.save(cluster, [cell(64, 30.0)], tmp_path)
    between.save(slow, [cell(16, 40.0)], tmp_path)
    found = {one.kind: one for one in between.load(tmp_path)}
    assert {c.bytes: c.median_us for c in found["emulated hosts, 100mbit"].cells} == {4: 10.0, 16: 40.0}
    assert [one.kind for one in between.load(tmp_path)] == ["Slurm", "emulated hosts, 100mbit"], "the newest first"
    (tmp_path / between.FILE).write_text("{")
    assert between.load(tmp_path) == [], "what is damaged is measured again"
