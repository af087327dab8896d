"""Quantization-aware training as whole runs: by two launchers and by none, resumed, and turned into files; and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.deploy.command import Job, quantize
from lockstep.errors import InputError
from lockstep.quantize.scheme import Scheme
from lockstep.resolve import resolve
from lockstep.run import Run
from lockstep.settings import load
from lockstep.study import builtin
from support import SHORT, Cli, train_here

QAT = (*SHORT, "quantize=qat")


@pytest.fixture(scope="module")
def alone(module_cli: Cli) -> dict[str, Any]:
    return train_here(module_cli.runs, *QAT)


def test_ranks_of_two_launchers_train_what_one_process_trains(module_cli: Cli, alone: dict[str, Any]) -> None:
    spawn, torchrun = (
        module_cli.run(*QAT, "ranks=2", f"launcher={launcher}", "strategy=ddp") for launcher in ("spawn", "torchrun")
    )
    # The digest is of weights and ranges.
    assert spawn["ranks_agree"]
    assert torchrun["ranks_agree"]
    assert spawn["weights_sha256"] == torchrun["weights_sha256"]
    for mine, one in zip(spawn["epochs"], alone["epochs"], strict=True):
        assert mine["train_loss"] == pytest.approx(one["train_loss"], rel=1e-3)
        assert mine["int8_accuracy"] == pytest.approx(one["int8_accuracy"], abs=0.01)
        assert mine["int8_accuracy"] == pytest.approx(mine["test_accuracy"], abs=0.02)
    assert spawn["int8_accuracy"] == spawn["epochs"][-1]["int8_accuracy"]
    assert alone["epochs"][-1]["int8_loss"] < 0.9 * alone["epochs"][0]["int8_loss"], "it does not learn"


def test_resumed_it_ends_bit_for_bit_as_if_nothing_had_happened(module_cli: Cli, alone: dict[str, Any]) -> None:
    first = module_cli.run(*QAT, "epochs=1", "--checkpoint-every", "1")
    again = module_cli.run("--resume", first["id"], "epochs=2")
    assert again["weights_sha256"] == alone["weights_sha256"]
    assert again["int8_loss"] == alone["int8_loss"]


def test_the_int8_file_of_a_run_has_the_ranges_of_its_training(alone: dict[str, Any]) -> None:
    run = Run(Path(alone["run"]))
    found = quantize(run, Job(method="qat", onnx=False), lambda text: None)
    assert found["calibration"] == "ranges of the run's own training on embedded's training set"
    assert found["accuracy"]["fake"] == alone["test_accuracy"]
    assert found["accuracy"]["int8"] == pytest.approx(alone["int8_accuracy"], abs=0.01)
    kept = torch.load(run.folder / "model.pt", weights_only=True)
    (low, high), row = kept["0.input_range"].tolist(), found["layers"][0]
    assert row["scale"] == pytest.approx((high - low) / 127)
    int8 = torch.load(Path(found["folder"]) / "int8.pt", weights_only=True)
    assert int8["0.weight"].dtype == torch.int8
    back = int8["0.weight"] * int8["0.weight_scale"].view(-1, 1, 1, 1)
    assert (back - kept["0.weight"]).abs().max() <= 0.501 * int8["0.weight_scale"].max()
    with pytest.raises(InputError, match="this run was trained with quantize=qat, which has chosen them"):
        quantize(run, Job(method="qat", scheme=Scheme(bits=8)), lambda text: None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("precision=bf16",), "quantize=qat trains in fp32, not precision=bf16"),
        (("compile=true",), "quantize=qat does not go with compile=true"),
        (("fused=true",), "quantize=qat does not go with fused=true"),
        (("ranks=2", "strategy=fsdp"), "quantize=qat does not go with strategy=fsdp: choose strategy=ddp"),
    ],
)
def test_what_does_not_go_with_it_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve(*load([], ["quantize=qat", *words]))


def test_the_study_has_the_published_topologies_with_and_without() -> None:
    (study,) = builtin.find("quantization")
    cells = {cell: study.settings(cell) for cell in study.all_cells()}
    assert {name: (recipe.quantize, where.ranks, where.hosts) for name, (recipe, where) in cells.items()} == {
        "2x1 fp32": ("off", 2, 2),
        "2x1 qat": ("qat", 2, 2),
        "2x2 fp32": ("off", 4, 2),
        "2x2 qat": ("qat", 4, 2),
    }
    (published,) = study.published
    assert set(published.figures) == set(cells)
