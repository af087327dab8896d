"""`lockstep quantize` on a real run: every method, its files loaded without Lockstep, and what is said where it cannot work."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.errors import InputError
from lockstep.quantize.scheme import Scheme
from support import Cli, train_here

PAGE = Path(__file__).parents[1] / "docs" / "quantization.md"
# Around an example of the page: nothing of Lockstep can be imported.
STRANGER = """
import sys
sys.modules["lockstep"] = None
import numpy as np
images = np.load("images.npy")
{before}
{example}
np.save("{result}", {after})
"""


def example(word: str) -> str:
    """The page's example that uses this."""
    (found,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if word in block]
    return str(found)


def run_example(folder: Path, word: str, before: str, after: str) -> np.ndarray[Any, Any]:
    script = STRANGER.format(before=before, example=example(word), after=after, result=f"{word}.npy")
    subprocess.run([sys.executable, "-c", script], cwd=folder, check=True, timeout=100)
    found: np.ndarray[Any, Any] = np.load(folder / f"{word}.npy")
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    cli = Cli(tmp_path_factory.mktemp("quantize"))
    words = ("data=embedded", "train_limit=4000", "epochs=2", "optimizer.lr=0.003", "regularize.batch_norm=per-rank")
    cli.run(*words, "threads=1", "--name", "net")
    return cli


def quantized(cli: Cli, *words: str) -> dict[str, Any]:
    found = cli("quantize", "net", *words, "--json", timeout=200)
    assert found.returncode == 0, found.stderr
    document: dict[str, Any] = json.loads(found.stdout)
    return document


def test_static_keeps_the_accuracy_and_its_file_loads_without_lockstep(trained: Cli) -> None:
    found = quantized(trained, "--sensitivity")
    accuracy = found["accuracy"]
    assert accuracy["fp32"] > 0.8
    assert abs(accuracy["int8"] - accuracy["fp32"]) < 0.01
    assert found["test_samples"] == 2000
    assert found["agreement"]["int8 with fp32"] > 0.98
    assert found["agreement"]["int8 with fake"] > 0.995
    assert found["calibration"].startswith("1024 images of embedded's training set")
    chosen = [row["layer"] for row in found["layers"] if row["quantized"]]
    assert len(chosen) == 3
    assert {row["layer"] for row in found["sensitivity"]} == set(chosen)
    assert found["bytes"]["fp32"]["file"] / found["bytes"]["int8"]["file"] > 2.2
    assert found["bytes"]["fp32"]["weights"] / found["bytes"]["int8"]["weights"] > 3.5
    report = json.loads((Path(found["folder"]) / "report.json").read_text())
    assert report["accuracy"] == accuracy
    beside = {row["what"]: row for row in found["published"]}
    assert beside["checkpoint"]["published"] == "19 KB → 8.7 KB (2.2x)"
    assert f"{accuracy['int8']:.2%}" in beside["test accuracy, fp32 → int8"]["ours"]

    images = np.random.default_rng(1).uniform(-1, 1, (5, 1, 28, 28)).astype(np.float32)
    folder = Path(found["folder"])
    np.save(folder / "images.npy", images)
    expected = _scores(trained.runs / "net", images)
    before = "import torch; images = torch.from_numpy(images)"
    scores = run_example(folder, "torch.export.load", before, "scores.detach().numpy()")
    assert np.abs(scores - expected).max() < 0.15 * expected.std()
    if not (folder / "int8.onnx").exists():
        assert any("pip install 'lockstep-bench[onnx]'" in note for note in found["notes"])
        pytest.skip("onnx, onnxscript or onnxruntime not installed")
    answer = run_example(folder, "onnxruntime", "", "scores")
    assert np.abs(answer - scores).max() < 0.05 * expected.std()
    assert found["accuracy"]["int8 in ONNX Runtime"] == pytest.approx(accuracy["int8"], abs=0.003)


def _scores(folder: Path, images: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The run's own model in fp32."""
    import torch

    from lockstep.deploy.subject import load
    from lockstep.run import Run

    with torch.no_grad():
        found: np.ndarray[Any, Any] = load(Run(folder)).model(torch.from_numpy(images)).numpy()
    return found


def in_process(cli: Cli, run: str = "net", **job: Any) -> dict[str, Any]:
    from lockstep.deploy.command import Job, quantize
    from lockstep.run import Run

    return quantize(Run(cli.runs / run), Job(onnx=False, **job), lambda text: None)


OWN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.up = nn.Conv2d(1, 4, 3, padding=1, stride=4), nn.ConvTranspose2d(4, 2, 2, stride=2)
        self.head = nn.Linear(2 * 14 * 14, 10)

    def forward(self, x):
        return self.head(torch.sigmoid(self.up(torch.relu(self.conv(x)))).flatten(1))
"""


def test_a_model_of_ones_own_with_an_operator_that_cannot_be_quantized(trained: Cli) -> None:
    (trained.folder / "own.py").write_text(OWN)
    run = train_here(
        trained.runs, "data=embedded", f"model={trained.folder}/own.py:Net", "train_limit=640", "threads=1"
    )
    shown = trained("quantize", run["id"], "--engine", "qnnpack", "--profile", "--no-onnx")
    assert shown.returncode == 0, shown.stderr
    words = " ".join(shown.stdout.split())
    assert "engines here: onednn, " in words
    assert "a part is quantized only; still in fp32: up (ConvTranspose2d)" in words
    assert "computed in fp32 between the layers: conv_transpose2d, sigmoid" in words
    assert "torch's profiler does not see qnnpack give back the memory of its tensors" in words
    assert "Operators of int8" in words
    assert "quantized::conv2d_relu" in words
    report = json.loads((trained.runs / run["id"] / "quantized" / "static" / "report.json").read_text())
    assert [row["layer"] for row in report["layers"] if row["quantized"]] == ["conv", "head"]
    assert report["agreement"]["int8 with fp32"] > 0.95
    assert report["published"] == []
    assert report["calibration"].startswith("640 images of embedded's training set")


def test_ranges_that_leave_something_out(trained: Cli) -> None:
    wide = in_process(trained, method="static")
    for ranges in ("percentile", "mse"):
        found = in_process(trained, method="static", scheme=Scheme(ranges=ranges))  # type: ignore[arg-type]
        assert found["calibration"].endswith(f"; ranges by {ranges}")
        assert all(
            narrow["scale"] <= before["scale"]
            for narrow, before in zip(found["layers"], wide["layers"], strict=True)
            if narrow["quantized"]
        )
        assert found["accuracy"]["int8"] == pytest.approx(found["accuracy"]["fp32"], abs=0.02)
    words = ["quantize", "net", "--method", "dynamic", "--ranges", "mse"]
    assert "--method dynamic has none: leave it out" in trained.error(*words, code=2)


def test_dynamic_and_quantization_aware_fine_tuning_of_the_same_run(trained: Cli) -> None:
    dynamic = in_process(trained, method="dynamic", engine="qnnpack", profile=True)
    assert "aten::mkldnn_convolution" in {row["name"] for row in dynamic["operators"]["fp32"]}
    assert "quantized::linear_dynamic" in {row["name"] for row in dynamic["operators"]["int8"]}
    assert [row["kind"] for row in dynamic["layers"] if row["quantized"]] == ["Linear"]
    assert abs(dynamic["accuracy"]["int8"] - dynamic["accuracy"]["fp32"]) < 0.01
    aware = in_process(trained, method="qat")
    assert aware["accuracy"]["int8"] > aware["accuracy"]["fp32"] - 0.01
    assert aware["accuracy"]["int8"] == pytest.approx(aware["accuracy"]["fake"], abs=0.005)
    assert aware["calibration"] == "1 more epoch on embedded's training set, ranges in training"
    # Batch norm is folded before, so that one scale for a layer is that of the weights that are deployed.
    coarse = in_process(trained, method="qat", scheme=Scheme(weights="per-tensor", activations="symmetric"))
    assert coarse["scheme"] == {"weights": "per-tensor", "activations": "symmetric", "bits": 7, "ranges": "min-max"}
    assert coarse["accuracy"]["int8"] == pytest.approx(coarse["accuracy"]["fake"], abs=0.005)
    assert {row["zero"] for row in coarse["layers"] if row["quantized"]} == {64}


@pytest.mark.slow
def test_times_and_memory_are_measured_by_routes_in_turns(trained: Cli) -> None:
    from lockstep.deploy import timing
    from lockstep.deploy.bench import Request

    request = Request(
        run=str(trained.runs / "net"),
        method="static",
        threads=1,
        batches=[2, 16],
        routes=["fp32 eager", "int8 onednn", "int8 nonsense"],
        rounds=4,
    )
    answer = timing.start(request)
    assert set(answer["samples"]) == {"2", "16"}
    assert "here are: onednn" in answer["failed"]["int8 nonsense"]
    for samples in answer["samples"].values():
        assert {name: len(times) for name, times in samples.items()} == {"fp32 eager": 4, "int8 onednn": 4}
        assert min(min(times) for times in samples.values()) > 0
    assert {name: len(times) for name, times in answer["cpu"]["2"].items()} == {"fp32 eager": 4, "int8 onednn": 4}
    grown = timing.memory(request, lambda text: None, ["int8 onednn"])
    assert grown[0]["growth_bytes"] > 128 * 28 * 28, "less than its first layer's input in bytes"
    made = {"fp32 eager": [4.0, 2.0, 3.0], "int8 onednn": [1.0, 1.0, 1.0]}
    row = timing._row(1, 16, "int8 onednn", made)
    assert (row["speed_up"], row["seconds"], row["images_per_second"]) == (3.0, 1.0, 16.0)
    assert row["speed_up_low"] < 3 < row["speed_up_high"]


def test_bad_input_is_one_line_that_says_what_to_do(trained: Cli) -> None:
    assert "here are: onednn" in trained.error("quantize", "net", "--engine", "tensorrt", code=2)
    with pytest.raises(InputError, match="the run trained on 4000 images"):
        in_process(trained, method="static", calibrate=5000)
    model = trained.runs / "net" / "model.pt"
    kept = model.read_bytes()
    model.unlink()
    try:
        words = (
            r"run net \(done\) has no model.pt: train it again with 'lockstep run', which keeps the weights at the end"
        )
        with pytest.raises(InputError, match=words):
            in_process(trained, method="static")
        model.write_bytes(b"not a file of torch")
        with pytest.raises(InputError, match=r"its model.pt does not fit its recipe's model"):
            in_process(trained, method="static")
    finally:
        model.write_bytes(kept)
