"""Cores: two runs are never pinned to one core while another is idle, and nobody keeps a core after its end."""

from __future__ import annotations

import multiprocessing
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from lockstep.launch import cores, prepare
from lockstep.launch.cores import cores_of
from lockstep.placement import Placement
from lockstep.process import CORES, pin
from lockstep.report.progress import cores_are_taken
from lockstep.run import Run, list_runs
from lockstep.settings import load
from support import SHORT, Cli, wait_for

MACHINE = sorted(os.sched_getaffinity(0))
FORK = multiprocessing.get_context("fork")

pytestmark = pytest.mark.skipif(len(MACHINE) < 2, reason="needs two cores")


@pytest.fixture(autouse=True)
def own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of the runs that this machine may be doing."""
    monkeypatch.setattr(cores, "NAME", f"\0lockstep-test-{os.getpid()}-")


def placement(count: int, **more: object) -> Placement:
    return Placement(ranks=1, threads=count, device="cpu", launcher="single", **more)  # type: ignore[arg-type]


def listed(text: str) -> list[int]:
    return [int(core) for core in text.removeprefix("any:").split(",")]


def _hold(count: int, talk: Connection) -> None:
    with cores_of(placement(count)) as environment:
        talk.send(environment[CORES])
        talk.recv()


@pytest.fixture
def other() -> Iterator[multiprocessing.process.BaseProcess]:
    """Another run, which holds one core."""
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=_hold, args=(1, theirs))
    process.start()
    assert ours.recv() == str(MACHINE[0])
    yield process
    process.kill()
    process.join()


def test_a_core_that_another_run_holds_is_left_to_it(other: multiprocessing.process.BaseProcess) -> None:
    with cores_of(placement(1)) as environment:
        assert environment == {CORES: str(MACHINE[1])}
        # One process's placements take turns: they share what it holds.
        with cores_of(placement(1)) as same:
            assert same == environment
        with cores_of(placement(len(MACHINE))) as more:
            assert more[CORES].startswith("any:"), "all or none"
            assert listed(more[CORES]) == MACHINE
        with cores_of(placement(1)) as again:
            assert again == environment
    other.kill()
    other.join()
    with cores_of(placement(len(MACHINE))) as environment:
        assert listed(environment[CORES]) == MACHINE, "a killed run holds nothing, and we gave ours back"


def test_where_nothing_is_to_be_held(monkeypatch: pytest.MonkeyPatch) -> None:
    for chosen in (placement(1, pin=False), Placement(launcher="slurm", device="cpu", threads=1)):
        with cores_of(chosen) as environment:
            assert environment == {}
    monkeypatch.setenv(CORES, "1")  # whoever started us has chosen
    with cores_of(placement(1)) as environment:
        assert environment == {}


def test_ranks_that_are_not_pinned_because_of_others_are_a_warning(tmp_path: Path) -> None:
    run, spec = prepare(*load([], [*SHORT, "ranks=2"]), runs=tmp_path)
    for text, expected in (("0,1", False), ("any:0,1", True), ("any:0", False), (None, False)):
        run.write_status("starting", **({"cores": text} if text else {}))
        assert cores_are_taken(run, spec) == expected, text


def _pinned(text: str, talk: Connection) -> None:
    os.environ[CORES] = text
    os.sched_setaffinity(0, {MACHINE[0]})  # as a launcher does that binds by itself
    talk.send([pin(0, 1, 1), sorted(os.sched_getaffinity(0))])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (str(MACHINE[-1]), [True, [MACHINE[-1]]]),
        ("any:" + ",".join(map(str, MACHINE)), [False, MACHINE]),
        ("", [True, [MACHINE[0]]]),
    ],
)
def test_a_rank_goes_where_it_is_told(text: str, expected: list[object]) -> None:
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=_pinned, args=(text, theirs))
    process.start()
    assert ours.recv() == expected
    process.join()


def test_two_runs_at_once_have_a_core_each(cli: Cli) -> None:
    """In a network namespace of their own, where no other run of this machine has names."""
    if os.geteuid() or shutil.which("unshare") is None:
        pytest.skip("a network namespace needs root and unshare")
    one = shlex.join(cli.argv("run", *SHORT, "epochs=100000"))
    both = subprocess.Popen(
        ["unshare", "--net", "bash", "-c", f"{one} & {one} & wait"], env=cli.environment, cwd=cli.folder
    )
    try:
        wait_for(lambda: len(environments(cli.runs)) == 2, seconds=90, what="both runs")
        held = [run.environment()["affinity"] for run in environments(cli.runs)]
        assert sorted(held) == [[MACHINE[0]], [MACHINE[1]]]
    finally:
        for run in list_runs(cli.runs):
            os.kill(int(run.recorded_status()["supervisor_pid"]), 9)
        both.wait(30)


def environments(runs: Path) -> list[Run]:
    return [run for run in list_runs(runs) if run.environment()]
