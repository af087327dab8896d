"""Watching processes: what ends a run, what does not, and what is said about it. Real processes, but none that has to import torch."""

from __future__ import annotations

import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import InputError, RunFailed
from lockstep.files import TEMPORARY
from lockstep.launch import prepare
from lockstep.launch.base import Start
from lockstep.launch.cause import first_cause, signal_name
from lockstep.launch.ending import HungUp, signals_as_interrupt
from lockstep.launch.supervise import supervise
from lockstep.run import RESERVE, Run, Spec, write_atomic
from lockstep.settings import load
from support import SHORT, processes_of, wait_for


@pytest.fixture
def planned(tmp_path: Path) -> tuple[Run, Spec]:
    return prepare(*load([], [*SHORT, "ranks=2"]), runs=tmp_path / "runs", name="mine")


def shell(text: str, rank: int | None = 0, what: str = "the launcher") -> Start:
    return Start(["sh", "-c", text], rank=rank, what=what)


def test_a_closed_terminal_is_heard_once() -> None:
    """The kernel says it, and the shell: the second must not disturb what follows from the first."""
    before = signal.getsignal(signal.SIGHUP)
    try:
        with pytest.raises(HungUp), signals_as_interrupt(), signals_as_interrupt(hung_up=HungUp) as received:
            signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        assert received == [signal.SIGHUP]
    finally:
        signal.signal(signal.SIGHUP, before)


def done(run: Run, before: str = "true") -> Start:
    """A rank that finishes the run."""
    return shell(f"{before}; printf '{{\"state\": \"done\"}}' > '{run.folder}/status.json'")


def endless(run: Run, rank: int = 0) -> Start:
    return Start([sys.executable, "-c", "import time; time.sleep(1000)", str(run.folder)], rank=rank)


def failed(run: Run, spec: Spec, *starts: Start, kind: type[Exception] = RunFailed) -> str:
    with pytest.raises(kind) as error:
        supervise(run, spec, list(starts), 0, None)
    wait_for(lambda: not processes_of(run.folder), what="every process to be gone")
    assert "\n" not in str(error.value)
    return str(error.value)


# ---------------------------------------------------------------- starting


def test_a_process_that_cannot_be_started_is_named_and_the_others_are_ended(planned: tuple[Run, Spec]) -> None:
    run, spec = planned
    message = failed(run, spec, endless(run), Start(["/no/such/program"], rank=1))
    assert message == "run failed: cannot start rank 1 (/no/such/program): No such file or directory"
    assert run.status()["state"] == "failed"
    assert run.status()["cause"] in message


def test_a_folder_that_is_read_only_is_no_failed_start(planned: tuple[Run, Spec]) -> None:
    run, spec = planned
    (run.folder / "launcher.log").mkdir()
    message = failed(run, spec, endless(run), kind=InputError)
    assert message.startswith(f"cannot write the run folder {run.folder}: Is a directory")


# ---------------------------------------------------------------- looking on


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(28, "No space left on device")])
def test_whoever_looks_on_may_go_away(planned: tuple[Run, Spec], error: OSError) -> None:
    run, spec = planned
    calls = []

    def progress(run: Run, spec: Spec) -> None:
        calls.append(1)
        (run.folder / "looked").touch()
        raise error

    supervise(
        run, spec, [done(run, f"while [ ! -e '{run.folder}/looked' ]; do sleep 0.05; done; sleep 0.5")], 0, progress
    )
    assert run.status()["state"] == "done"
    assert len(calls) == 1, "nobody is told anything after that"


# ---------------------------------------------------------------- the folder


def test_a_disk_that_fills_up_has_room_for_why_the_run_ended(small_disk: Path) -> None:
    run, spec = prepare(*load([], [*SHORT, "ranks=2"]), runs=small_disk, name="mine")
    message = failed(run, spec, shell(f"dd if=/dev/zero of='{small_disk}/filler' bs=4096 2>/dev/null; exit 3"))
    assert f"no room for the run in {small_disk}" in message
    status = run.status()
    assert status["state"] == "failed"
    assert "no room for the run" in status["cause"]
    assert not (run.folder / RESERVE).exists(), "that is what it was for"
    assert not list(run.folder.glob(TEMPORARY))


def test_a_rank_on_a_full_disk_leaves_its_failure_report(small_disk: Path) -> None:
    """What the worker does with an error of any file of the run."""
    run, spec = prepare(*load([], [*SHORT, "ranks=2"]), runs=small_disk, name="mine")
    code = (
        "import sys, pathlib\nfrom lockstep import worker\nfrom lockstep.run import Run, append_line\n"
        "from lockstep.backends.ranks import Rank\nrun = Run(pathlib.Path(sys.argv[1]))\n"
        "from lockstep.measure import records\nrecords.steps_taken = lambda folder: 45\n"
        "try:\n    [append_line(run.folder / 'epochs.jsonl', {'epoch': 1, 'x': 'y' * 100}) for _ in range(100000)]\n"
        "except OSError as error:\n    worker._fail(run, Rank(1, 2, 1, 2), error)\n"
    )
    message = failed(run, spec, Start([sys.executable, "-c", code, str(run.folder)], rank=1))
    assert message.startswith(f"run failed: rank 1 after step 45: no room for the run in {small_disk}")
    assert run.status()["rank"] == 1
    assert len(run.epochs()) == 1
    assert (run.folder / "epochs.jsonl").stat().st_size > 500_000, "what was written before is kept"


def test_a_checkpoint_that_does_not_fit_says_so_and_leaves_the_room_it_took(small_disk: Path) -> None:
    """torch itself says "unexpected pos"."""
    import torch

    from lockstep.training.checkpoint import save_whole

    content = {"a": torch.zeros(1 << 20), "b": torch.zeros(4 << 20)}
    with pytest.raises(OSError, match="No space left on device"):
        save_whole(small_disk / "model.pt", content)
    assert list(small_disk.iterdir()) == []
    assert save_whole(small_disk / "model.pt", {"a": content["a"]})


def test_a_folder_that_is_removed_in_mid_run_ends_it(planned: tuple[Run, Spec]) -> None:
    run, spec = planned
    message = failed(run, spec, shell(f"rm -rf '{run.folder}'; exec sleep 1000"), endless(run, 1))
    assert message == f"run failed: the run folder {run.folder} was removed while the run was under way"
    assert not run.folder.exists(), "nothing is written for a run that is gone"


def test_a_folder_that_is_removed_between_two_starts_ends_it_alike(planned: tuple[Run, Spec]) -> None:
    run, spec = planned

    class Starts(list[Start]):
        def __iter__(self) -> Iterator[Start]:
            yield shell(f"rm -rf '{run.folder}'; exec sleep 1000")
            wait_for(lambda: not run.folder.exists(), what="the folder to be gone")
            yield endless(run, 1)

    with pytest.raises(RunFailed) as error:
        supervise(run, spec, Starts(), 0, None)
    assert str(error.value) == f"run failed: the run folder {run.folder} was removed while the run was under way"


def test_a_folder_that_is_another_ones_by_now_is_left_alone(planned: tuple[Run, Spec], tmp_path: Path) -> None:
    run, spec = planned
    shutil.copytree(run.folder, tmp_path / "other")
    before = (tmp_path / "other" / "status.json").read_bytes()
    # It is noticed between the two, and the process is asked to end: it does so when it has done both.
    swap = f"trap '' TERM; mv '{run.folder}' '{tmp_path}/away'; mv '{tmp_path}/other' '{run.folder}'"
    assert "was removed while the run was under way" in failed(run, spec, shell(f"{swap}; exit 3"))
    assert (run.folder / "status.json").read_bytes() == before


# ---------------------------------------------------------------- the first cause


@pytest.mark.parametrize("what", ["torchrun's agent", "mpirun"])
def test_a_launcher_that_was_killed_is_the_first_cause(planned: tuple[Run, Spec], what: str) -> None:
    """Its ranks die with it; what they or those beside them could say is a consequence."""
    run, spec = planned
    account = {"rank": 1, "exit_code": -signal.SIGKILL, "time": time.time()}
    write_atomic(run.rank_folder(1) / "exit.json", account)
    message = failed(run, spec, shell("kill -9 $$", rank=None, what=what))
    cause = run.status()["cause"]
    assert cause.startswith(f"{what} (process ")
    assert "was killed by SIGKILL after step 0 (by hand, or by the system for lack of memory)" in cause
    assert message == f"run failed: {cause}; what was measured is in {run.folder}"


def test_a_launcher_that_ends_after_its_rank_was_killed_is_not(planned: tuple[Run, Spec]) -> None:
    run, spec = planned
    write_atomic(run.rank_folder(1) / "exit.json", {"rank": 1, "exit_code": -signal.SIGSEGV, "time": time.time()})
    failed(run, spec, shell("exit 139", rank=None, what="mpirun"))
    assert run.status()["cause"].startswith("rank 1 was killed by SIGSEGV after step 0")


def lost(run: Run, message: str, **beats: Any) -> str:
    """Rank 0 only says that it lost the others; rank 1 says nothing."""
    account = {"rank": 0, "kind": "RuntimeError", "message": message, "exit_code": 3, "consequence": True, "step": 45}
    write_atomic(run.rank_folder(0) / "failure.json", {**account, "time": time.time()})
    beat = {"state": "running", "time": 1.0, "pid": 1}
    write_atomic(run.rank_folder(0) / "status.json", {**beat, "rank": 0, "host": "node1", "waits": True})
    write_atomic(run.rank_folder(1) / "status.json", {**beat, "rank": 1, "host": "node2", **beats})
    return str(first_cause(run, [])["cause"])


def test_who_gave_up_waiting_and_who_lost_a_connection(planned: tuple[Run, Spec]) -> None:
    run, _ = planned
    late = "Timed out waiting 60000ms for recv operation to complete"
    held_up = "rank 1 did not come to the exchange after step 0, and the others gave up waiting"
    assert lost(run, late, waits=False) == held_up
    died = lost(run, "[pair.cc:547] Connection closed by peer [10.0.0.2]:4711", waits=False)
    assert "gave up" not in died
    assert died.endswith("; rank 1 on node2 left no failure report: the process or its host died")
    assert died.startswith("rank 0 after step 45: lost the other ranks: [pair.cc:547] Connection closed by peer")


def test_the_folders_room_is_given_back(planned: tuple[Run, Spec], monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep import launch
    from lockstep.launch import launchers

    run, spec = planned
    assert (run.folder / RESERVE).stat().st_blocks * 512 >= 10 * 4096
    starts: Callable[..., list[Start]] = lambda *_: [done(run)]  # noqa: E731
    monkeypatch.setattr(launchers, "starts_of", starts)
    launch.execute(run, spec)
    assert run.status()["state"] == "done"
    assert not (run.folder / RESERVE).exists()


def test_signals_without_a_name_are_told_by_their_number() -> None:
    assert signal_name(-9) == "SIGKILL"
    assert signal_name(-40) == "signal 40"
