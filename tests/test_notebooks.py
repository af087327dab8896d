"""The notebooks of examples/notebooks, and what else only a real kernel shows: errors of one line, interrupts, a kernel that is killed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lockstep.measure.records import read_steps
from lockstep.run import Run, list_runs
from support import processes_of, wait_for

HERE = Path(__file__).parents[1] / "examples/notebooks"
NOTEBOOKS = sorted(HERE.glob("*.ipynb"))
LARGEST = 300_000


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_kept_of_a_notebook_was_executed_and_is_small(notebook: Path) -> None:
    text = notebook.read_text()
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), "run make notebooks"
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert any("text/html" in output.get("data", {}) for output in outputs)
    assert len(text) < LARGEST
    without_pictures = re.sub(r"base64,[A-Za-z0-9+/=]+", "", text)
    assert not re.findall(r"(?<![\w.~])/(?:home|root|tmp|work|usr|var|Users)/[^\s\"\\]*", without_pictures)


def test_there_are_four() -> None:
    assert len(NOTEBOOKS) == 4


@pytest.mark.slow
@pytest.mark.cold
@pytest.mark.timeout(600)
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCKSTEP_RUNS", raising=False)
    content = _execute().execute(notebook, tmp_path)
    assert not [
        output for cell in content.cells for output in cell.get("outputs", []) if output.get("name") == "stderr"
    ]
    assert not processes_of(tmp_path)


def _execute() -> ModuleType:
    spec = importlib.util.spec_from_file_location("execute_notebooks", HERE / "execute.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Kernel:
    """A real kernel in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        from jupyter_client.manager import start_new_kernel

        self.folder = folder
        self.manager, self.client = start_new_kernel(kernel_name="python3", cwd=str(folder))

    def run(self, code: str) -> list[dict[str, Any]]:
        """What a cell shows."""
        self.client.execute(code)
        return self.shown()

    def shown(self, until: Callable[[dict[str, Any]], bool] | None = None) -> list[dict[str, Any]]:
        """What it shows until it is done, or until a message that is waited for."""
        found: list[dict[str, Any]] = []
        while True:
            message = self.client.get_iopub_msg(timeout=100)
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                return found
            if message["msg_type"] not in ("status", "execute_input"):
                found.append(message)
            if until and until(message):
                return found


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    made = Kernel(tmp_path)
    yield made
    made.client.stop_channels()
    made.manager.shutdown_kernel(now=True)


LONG = "import lockstep\nlockstep.run(data='embedded', ranks=2, threads=1, global_batch=32, epochs=500)"


def _under_way(folder: Path) -> Run:
    """A run of which every rank has taken steps."""

    def found() -> Run | None:
        runs = list_runs(folder / "runs")
        begun = runs and all(len(read_steps(runs[0].rank_folder(rank) / "steps.bin")) > 20 for rank in range(2))
        return runs[0] if begun else None

    run: Run = wait_for(found, what="steps on every rank")
    return run


@pytest.mark.slow
@pytest.mark.cold
def test_a_cell_that_is_interrupted_stops_every_rank_and_says_so_in_one_line(kernel: Kernel) -> None:
    (error,) = [m for m in kernel.run("import lockstep\nlockstep.run(rank=2)") if m["msg_type"] == "error"]
    assert error["content"]["traceback"] == ["InputError: unknown key 'rank': did you mean 'ranks'?"]

    kernel.client.execute(LONG)
    in_place = kernel.shown(
        until=lambda message: message["msg_type"] == "update_display_data" and "samples/s" in str(message["content"])
    )
    run = _under_way(kernel.folder)
    kernel.manager.interrupt_kernel()
    messages = [*in_place, *kernel.shown()]
    (error,) = [message for message in messages if message["msg_type"] == "error"]
    assert error["content"]["traceback"] == [f"RunCancelled: stopped; what was measured is in {run.folder}"]
    assert run.status()["state"] == "cancelled"
    assert not processes_of(kernel.folder / "runs")
    assert len([message for message in messages if message["msg_type"] == "display_data"]) == 1, (
        "one output, which changes"
    )
    assert not [message for message in messages if message["msg_type"] == "stream"], "nothing red below the cell"

    (text,) = [message for message in kernel.run("lockstep.Run.find()") if "data" in message["content"]]
    assert "cancelled: stopped by the user" in text["content"]["data"]["text/plain"]
    assert "<b>" in text["content"]["data"]["text/html"]


@pytest.mark.slow
@pytest.mark.cold
def test_a_kernel_that_is_killed_leaves_no_process_behind(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    kernel.client.execute(LONG)
    run = _under_way(tmp_path)
    kernel.client.stop_channels()
    os.kill(kernel.manager.provisioner.pid, signal.SIGKILL)  # type: ignore[union-attr]
    wait_for(lambda: not processes_of(tmp_path / "runs"), what="all ranks to be gone")
    assert len(read_steps(run.rank_folder(0) / "steps.bin")) > 20, "what was measured is there"
    kernel.manager.shutdown_kernel(now=True)
