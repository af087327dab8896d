"""The run folder: readable whatever was cut off, and honest about who is still alive."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import InputError
from lockstep.measure.events import EventFile
from lockstep.measure.records import ROW, WARMUP_STEPS, StepLog, read_steps
from lockstep.placement import Placement
from lockstep.plan import plan
from lockstep.reading import read_records
from lockstep.recipe import Recipe
from lockstep.run import Run, Spec, append_line, list_runs, write_atomic


def spec(name: str = "one") -> Spec:
    recipe, placement = Recipe(), Placement(ranks=2)
    worked = plan(recipe, placement, 100, 10)
    return Spec(id=name, created=1.0, lockstep="0", recipe=recipe, placement=placement, plan=worked)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    run = Run.create(tmp_path, spec())
    assert run.spec() == spec()
    assert run.status()["state"] == "planned"
    assert [found.id for found in list_runs(tmp_path)] == ["one"]
    with pytest.raises(InputError, match="exists already"):
        Run.create(tmp_path, spec())


@settings(deadline=None)
@given(st.lists(st.dictionaries(st.text(), st.integers() | st.text())), st.integers(0, 40))
def test_a_cut_last_line_is_passed_over(records: list[dict[str, object]], cut: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lines.jsonl"
        for record in records:
            append_line(path, record)
        append_line(path, {"last": "x" * 40})
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) - 1 - cut])
        read = read_records(path, dict[str, Any])
        assert read[: len(records)] == records
        assert len(read) == len(records) + (cut == 0)


def test_step_rows_survive_a_kill_and_ignore_what_is_reserved(tmp_path: Path) -> None:
    """A process that writes rows is killed with SIGKILL: every row it had written is there, and no other."""
    path = tmp_path / "steps.bin"
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=_write_rows, args=(path, 25, ready))
    process.start()
    assert ready.wait(60)
    process.kill()
    process.join()
    assert path.stat().st_size == 1000 * ROW.itemsize, "reserved, and not cut by a proper end"
    rows = read_steps(path)
    assert rows["step"].tolist() == list(range(1, 26))
    assert rows["loss_sum"].tolist() == [0.5 * i for i in range(25)]
    assert rows["warmup"].tolist() == [1] * WARMUP_STEPS + [0] * (25 - WARMUP_STEPS)


def _write_rows(path: Path, count: int, ready: object) -> None:
    log = StepLog(path, 1000, torch.device("cpu"))
    for i in range(count):
        log.loss[i] = torch.tensor(0.5 * i)
        log.correct[i] = torch.tensor(i)
        log.write(1, 32, i, [1, 2, 3, 4, 5], 20)
    ready.set()  # type: ignore[attr-defined]
    time.sleep(60)


def test_a_closed_log_is_cut_to_size_and_a_cut_row_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "steps.bin"
    log = StepLog(path, 100, torch.device("cpu"))
    for _ in range(3):
        log.write(1, 32, 7, [1, 2, 3, 4, 5], 20)
    log.close()
    assert path.stat().st_size == 3 * ROW.itemsize
    data = path.read_bytes()
    path.write_bytes(data[:-5])
    assert len(read_steps(path)) == 2
    assert np.array_equal(np.frombuffer(data, dtype=ROW)["exchange_ns"], [4, 4, 4])
    assert len(read_steps(tmp_path / "none.bin")) == 0


def test_atomic_replacement_leaves_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for value in range(3):
        write_atomic(path, {"value": value})
    assert json.loads(path.read_text()) == {"value": 2}
    assert list(tmp_path.iterdir()) == [path]


def test_a_run_whose_watcher_is_gone_is_not_running(tmp_path: Path) -> None:
    run = Run.create(tmp_path, spec())
    gone = multiprocessing.get_context("fork").Process(target=lambda: None)
    gone.start()
    gone.join()
    run.write_status("running", supervisor_pid=gone.pid, host=os.uname().nodename)
    assert run.status()["state"] == "failed"
    assert "is gone" in run.status()["cause"]
    run.write_status("running", supervisor_pid=os.getpid(), host=os.uname().nodename)
    assert run.status()["state"] == "running"
    run.write_status("running", supervisor_pid=gone.pid, host="another-host")
    assert run.status()["state"] == "running", "nothing can be said of another host's processes"


def test_a_silent_rank_is_stalled(tmp_path: Path) -> None:
    run = Run.create(tmp_path, spec())
    run.write_status("running", supervisor_pid=os.getpid(), host=os.uname().nodename)
    for rank, age in ((0, 1), (1, 100)):
        beat = {"rank": rank, "state": "running", "time": time.time() - age}
        write_atomic(run.rank_folder(rank) / "status.json", beat)
    status = run.status()
    assert status["state"] == "stalled"
    assert status["cause"].startswith("rank 1 gave no sign of life for 100 s")


def test_a_run_of_another_format_is_named(tmp_path: Path) -> None:
    run = Run.create(tmp_path, spec())
    content = json.loads((run.folder / "run.json").read_text())
    content["recipe"]["unheard_of"] = 1
    (run.folder / "run.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match="of another version"):
        run.spec()


def test_every_field_of_a_spec_survives_json(tmp_path: Path) -> None:
    assert msgspec.json.decode(msgspec.json.encode(spec()), type=Spec) == spec()


def test_event_files_hold_what_tensorboard_reads(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventFile(tmp_path)
    for step in (1, 200, 70_000, 5_000_000_000):
        events.scalars(step, {"a/b": step / 3, "ünï": -1.5})
    events.close()
    reader = EventAccumulator(str(tmp_path))
    reader.Reload()
    assert [point.step for point in reader.Scalars("a/b")] == [1, 200, 70_000, 5_000_000_000]
    assert reader.Scalars("a/b")[1].value == pytest.approx(200 / 3)
    assert reader.Scalars("ünï")[0].value == -1.5
