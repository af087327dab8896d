"""Ranks that fall out of step: who is named, where, how soon; and who is not. Real ranks under every launcher, on every backend that waits."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.launch.emulated import network as emulate
from lockstep.launch.hang import diagnose
from lockstep.measure.callsite import Frame, call_site, of_error
from lockstep.run import HANG, Run, read_json
from slurm_cluster import Cluster
from support import Cli, processes_of, wait_for

SCRIPT = Path(__file__).with_name("desync.py")
# Before the ranks give up waiting; on a free machine it takes less than ten seconds (below).
GIVE_UP_S = 20.0
SOON_S = 10.0
# Rank 1 does something else than the others: nobody can go on, or a collective fails.
MISMATCHES = ("skip", "collective", "shape", "dtype", "order", "return", "barrier")
# Rank 1 is somewhere else, and may still come.
ABSENT = ("lock", "sleep", "busy")
FAULTS = (*MISMATCHES, *ABSENT, "raise")
# Each fault takes a quarter of a minute: by other launchers than ours, one of each kind, unless all are asked for.
OTHERS = FAULTS if os.environ.get("LOCKSTEP_SLOW_TESTS") else ("collective", "return", "sleep", "raise")

pytestmark = pytest.mark.cold


def lines_of(fault: str, what: str) -> list[int]:
    lines = SCRIPT.read_text().splitlines()
    return [n for n, line in enumerate(lines, 1) if re.search(rf"# {what}: .*\b{fault}\b", line)]


def line_of(fault: str) -> int:
    return next(iter(lines_of(fault, "at")), 0)


class Desync:
    """One run with a fault: what was said, and how long after the fault."""

    def __init__(self, cli: Cli, fault: str, *words: str) -> None:
        marks = cli.folder / f"marks-{fault}"
        marks.mkdir()
        argv = cli.argv(
            "run", str(SCRIPT), *words, f"timeout_s={GIVE_UP_S:g}", "threads=1", "pin=false", "--", fault, str(marks)
        )
        self.process = subprocess.Popen(
            argv, env=cli.environment, cwd=cli.folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        happened = marks / "happened"
        wait_for(lambda: happened.exists() or self.process.poll() is not None, 100, "the fault")
        self.run = wait_for(
            lambda: next((Run(p.parent) for p in cli.runs.glob("*/run.json")), None), what="the run folder"
        )
        self.seconds = self._named_after(happened)
        _, self.errors = self.process.communicate(timeout=60)
        self.status = self.run.status()
        self.warning = (read_json(self.run.folder / HANG) or {}).get("text", "")
        wait_for(lambda: not processes_of(self.run.folder), seconds=10, what="every process to be gone")

    def _named_after(self, happened: Path) -> float:
        """Until the run says who it is: as a warning, or by its end."""
        while self.process.poll() is None and not (self.run.folder / HANG).exists():
            time.sleep(0.05)
        return time.time() - happened.stat().st_mtime


def judge(found: Desync, fault: str) -> None:
    said = found.status["cause"]
    assert found.process.returncode == 3, found.errors
    assert found.seconds < GIVE_UP_S, (found.seconds, found.errors)
    assert "Traceback" not in found.errors
    assert found.status.get("rank") in (1, None), f"a victim was blamed: {said}"
    if fault == "raise":
        assert said.startswith(f"rank 1 after step 11: ValueError: the planted fault ({SCRIPT}:{line_of('raise')})"), (
            said
        )
        return
    assert "rank 1" in said, said
    if fault in ABSENT:
        for text in (said, found.warning):
            lines = (line_of(fault), line_of(fault) - 1)  # of a loop, either of its two
            assert any(f"rank 1 is in no collective at {SCRIPT}:{line} " in text for line in lines), text
            assert (
                re.search(r"rank 0 waits in all_reduce of float32\[5\] at \S+desync.py:\d+", text)
                or "ranks 0, 2 wait" in text
            )
        assert "warning: no rank has made progress for" in found.errors
        assert said.startswith("rank 1 did not come to the exchange after step 11, and the others gave up waiting: ")
        return
    # Each rank's collective, with its line; of rank 1, another one than the others'.
    places = re.findall(r"in (?:call (\d+), )?(\w[\w ]*?)(?: of (\S+\]))? at (\S+?):(\d+) \(", said)
    assert len(places) >= 2, said
    assert len(set(places)) > 1, said
    if line := line_of(fault):
        assert re.search(rf"rank 1 (is )?in (call \d+, )?\S+ of \S+ at \S+desync.py:{line} ", said), said
    if lines := lines_of(fault, "others"):
        where = "|".join(map(str, lines))
        assert re.search(
            rf"rank(s 0, 2 wait| 0 waits| 0) in (call \d+, )?\S+( of \S+)? at \S+desync.py:({where}) ", said
        ), said


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("fault", FAULTS)
def test_three_ranks_started_by_us(cli: Cli, fault: str, backend: str) -> None:
    """With three, most are right, and the other one is named."""
    found = Desync(cli, fault, "ranks=3", f"backend={backend}")
    judge(found, fault)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
@pytest.mark.parametrize("fault", OTHERS)
def test_two_ranks_of_other_launchers(cli: Cli, fault: str, launcher: str) -> None:
    """With two, nobody knows who is right where both are in a collective: both are named."""
    judge(Desync(cli, fault, "ranks=2", f"launcher={launcher}", "backend=gloo"), fault)


@pytest.mark.slow
@pytest.mark.skipif(emulate.problem() is not None, reason=str(emulate.problem()))
@pytest.mark.parametrize("fault", OTHERS)
def test_two_emulated_hosts(cli: Cli, fault: str) -> None:
    judge(Desync(cli, fault, "hosts=emulated:2", "ranks=2", "link=1gbit,0.5ms", "backend=gloo"), fault)


@pytest.mark.slow
@pytest.mark.parametrize("fault", OTHERS)
def test_two_ranks_of_mpi(cli: Cli, fault: str) -> None:
    judge(Desync(cli, fault, "ranks=2", "launcher=mpirun", "backend=mpi"), fault)


@pytest.mark.slow
@pytest.mark.parametrize("fault", OTHERS)
def test_two_nodes_of_a_cluster(cluster: Cluster, cli: Cli, fault: str) -> None:
    """A real Slurm, one rank on each of its two nodes."""
    cli.environment |= cluster.environment
    judge(Desync(cli, fault, "hosts=2", "ranks=2", "launcher=slurm", "backend=gloo"), fault)


@pytest.mark.slow
@pytest.mark.parametrize("fault", OTHERS)
def test_two_ranks_on_one_node_of_a_cluster(cluster: Cluster, cli: Cli, fault: str) -> None:
    cli.environment |= cluster.environment
    judge(Desync(cli, fault, "ranks=2", "launcher=slurm", "backend=shm"), fault)


@pytest.mark.alone
@pytest.mark.parametrize("fault", ["collective", "sleep"])
def test_a_hang_is_named_within_ten_seconds(cli: Cli, fault: str) -> None:
    found = Desync(cli, fault, "ranks=2", "backend=gloo")
    judge(found, fault)
    assert found.seconds < SOON_S


@pytest.mark.slow
@pytest.mark.parametrize("reason", ["save", "evaluation"])
def test_a_rank_that_is_merely_slow_is_not_accused(cli: Cli, reason: str) -> None:
    """Nine seconds in which one rank writes a file, or evaluates, and the others wait for it."""
    marks = cli.folder / "marks"
    marks.mkdir()
    done = cli("run", str(SCRIPT), "ranks=2", "timeout_s=20", "threads=1", "pin=false", "--", reason, str(marks))
    assert done.returncode == 0, done.stderr
    assert "warning: no rank" not in done.stderr
    (run,) = [Run(path.parent) for path in cli.runs.glob("*/run.json")]
    assert not (run.folder / HANG).exists()
    assert run.status()["state"] == "done"


# ---------------------------------------------------------------- who is named, from places alone


def site(collective: str | None = None, of: str = "float32[3]", line: int = 5, **more: object) -> dict[str, object]:
    found: dict[str, object] = {"file": "t.py", "line": line, "code": "x", "calls": 7, **more}
    return found | ({"collective": collective, "of": of} if collective else {})


def test_the_rank_that_is_in_no_collective_is_named_and_not_called_certain() -> None:
    hang = diagnose({0: site("all_reduce"), 1: site(line=9), 2: site("all_reduce")})
    assert hang is not None
    assert (hang.rank, hang.certain) == (1, False)
    assert hang.text == (
        "rank 1 is in no collective at t.py:9 (x); ranks 0, 2 wait in all_reduce of float32[3] at t.py:5 (x)"
    )


def test_of_three_the_one_in_another_collective_is_named() -> None:
    hang = diagnose({0: site("all_reduce"), 1: site("all_reduce", of="float64[3]"), 2: site("all_reduce")})
    assert hang is not None
    assert (hang.rank, hang.certain) == (1, True)


def test_parts_of_other_sizes_are_no_mismatch() -> None:
    """all_to_all_single sends each rank as much as it says: only the type has to be the same."""
    frames = [made_call("all_to_all_single", tensor) for tensor in (torch.zeros(100), torch.zeros(300))]
    sites = {rank: call_site([frame]) | {"calls": 7} for rank, frame in enumerate(frames)}
    assert {site["of"] for site in sites.values()} == {"float32"}
    assert diagnose(sites) is None
    whole = [made_call("all_reduce", tensor) for tensor in (torch.zeros(100), torch.zeros(300))]
    hang = diagnose({rank: call_site([frame]) | {"calls": 7} for rank, frame in enumerate(whole)})
    assert hang is not None
    assert hang.certain


@pytest.mark.parametrize("text", ["self.handle.wait()", "tensor = wait_tensor(tensor)"])
def test_a_wait_for_a_collective_is_one_whoever_holds_it(text: str, tmp_path: Path) -> None:
    """It is a call into C++: the innermost frame is the line that makes it, in torch's own files too."""
    file = tmp_path / "hook.py"
    file.write_text(f"{text}\n")
    assert call_site([Frame(str(file), 1, "hook")])["collective"] == "wait"
    file = tmp_path / "other.py"
    file.write_text("lock.acquire()\n")
    assert "collective" not in call_site([Frame(str(file), 1, "hook")])


def made_call(name: str, tensor: torch.Tensor) -> Frame:
    """A call of torch.distributed, as a stack shows it."""
    code = f"def {name}(output):\n    raise ValueError"
    space: dict[str, Any] = {}
    exec(compile(code, "torch/distributed/distributed_c10d.py", "exec"), space)
    try:
        space[name](tensor)
    except ValueError as error:
        return of_error(error.__traceback__)[0]
    raise AssertionError


def test_of_two_in_different_collectives_none_is_blamed() -> None:
    hang = diagnose({0: site("all_reduce"), 1: site("barrier", of="")})
    assert hang is not None
    assert (hang.rank, hang.certain) == (None, True)
    assert hang.text.startswith("ranks are in different collectives: rank 0 in all_reduce")


@pytest.mark.parametrize("more", [{"calls": 8}, {"group": "pair"}])
def test_what_a_slow_link_may_do_is_not_certain(more: dict[str, object]) -> None:
    """A broadcast's sender goes on to the next collective while the others still receive; groups of some ranks are no match for others."""
    hang = diagnose({0: site("all_reduce", **more), 1: site("broadcast")})
    assert hang is not None
    assert not hang.certain


def test_ranks_in_the_same_collective_a_call_apart_may_have_lost_a_message() -> None:
    """A cable that is cut between the two halves of an exchange: one rank has got all it waits for, and goes on."""
    hang = diagnose({0: site("all_reduce", calls=75), 1: site("all_reduce", calls=76), 2: site("all_reduce", calls=75)})
    assert hang is not None
    assert (hang.rank, hang.certain) == (None, False)
    assert hang.text == (
        "ranks 0, 2 wait in call 75, all_reduce of float32[3] at t.py:5 (x), "
        "rank 1 waits in call 76, all_reduce of float32[3] at t.py:5 (x): "
        "what a rank sent may have been lost on its way, or a rank called once too often"
    )


def test_ranks_in_the_same_collective_and_ranks_that_all_compute_are_no_hang() -> None:
    assert diagnose({0: site("all_reduce"), 1: site("all_reduce", line=8)}) is None
    assert diagnose({0: site(), 1: site()}) is None


def test_a_rank_that_ended_without_a_word_is_named() -> None:
    hang = diagnose({0: site("barrier", of="")}, gone=[1])
    assert hang is not None
    assert (hang.rank, hang.certain) == (1, True)
    assert hang.text.startswith("rank 1 ended without a word; rank 0 waits in barrier at t.py:5")
