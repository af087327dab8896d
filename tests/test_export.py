"""Exported tables hold what the run folders hold, and open in the tools they are for."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.measure.records import read_steps
from support import SHORT, Cli


@pytest.fixture(scope="module")
def run(module_cli: Cli) -> dict[str, Any]:
    return module_cli.run(*SHORT, "threads=1", "ranks=2")


def exported(cli: Cli, name: str, *words: str) -> Path:
    result = cli("export", "last", "-o", name, *words)
    assert result.returncode == 0, result.stderr
    return cli.folder / name


def test_runs_as_csv(module_cli: Cli, run: dict[str, Any]) -> None:
    with exported(module_cli, "runs.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["run"] == run["id"]
    assert row["state"] == "done"
    assert float(row["recipe.optimizer.lr"]) == 0.005
    assert int(row["placement.ranks"]) == 2
    assert float(row["test_accuracy"]) == run["test_accuracy"]


def test_epochs_as_json(module_cli: Cli, run: dict[str, Any]) -> None:
    rows = json.loads(exported(module_cli, "epochs.json", "--what", "epochs").read_text())
    assert [row["train_loss"] for row in rows] == [epoch["train_loss"] for epoch in run["epochs"]]


def test_steps_as_parquet_open_with_arrow(module_cli: Cli, run: dict[str, Any]) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow: pip install 'lockstep-bench[export]'")
    table = parquet.read_table(exported(module_cli, "steps.parquet", "--what", "steps"))
    assert table.num_rows == 60
    for rank in (0, 1):
        rows = read_steps(Path(run["run"]) / "ranks" / f"{rank:04d}" / "steps.bin")
        mine = [row for row in table.to_pylist() if row["rank"] == rank]
        assert [row["total_ns"] for row in mine] == rows["total_ns"].tolist()
        assert [row["loss_sum"] for row in mine] == rows["loss_sum"].tolist()


def test_what_cannot_be_written(module_cli: Cli, run: dict[str, Any]) -> None:
    assert "its ending says no format" in module_cli.error("export", "last", "-o", "runs.xyz", code=2)
    assert "there is no folder" in module_cli.error("export", "last", "-o", "nowhere/runs.csv", code=2)


def test_a_folder_for_tensorboard(module_cli: Cli, run: dict[str, Any]) -> None:
    """What is in it is looked at in test_export_trackers.py."""
    board = exported(module_cli, "board", "--format", "tensorboard")
    assert [path.name for path in board.iterdir() if path.name != "ranks"] == [run["id"]]
    assert len(list((board / "ranks").rglob("events.out.tfevents.*"))) == 2
    tensorboard = ("--format", "tensorboard")
    assert "leave it out" in module_cli.error("export", "last", "-o", "b", *tensorboard, "--what", "steps", code=2)
    assert "is a folder already" in module_cli.error("export", "last", "-o", "board", "--format", "csv", code=2)
