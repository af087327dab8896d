"""The embedded sets: the same on every machine, balanced, and worth learning."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lockstep.data import open_data
from lockstep.data.embedded import draw

GOLDEN = {
    ("embedded", "train"): "503bcebcefa9a02a4b37da5e97d280167b501a197c69176433c5259381a115f2",
    ("embedded", "test"): "dfdce3d5fa5ed39845191a827d256e26f4f20fbf26d98fa48b9aded348d042ca",
    ("embedded-color", "train"): "cc757a4ea642e528d9e736042f937e988b7de670bc33eda3b4866aea7e663783",
    ("embedded-color", "test"): "a55a4138e0181ef407005027cf6624990cd7ec99cb6900b803058e68b2a7ea3f",
}


def _digest(name: str, split: str) -> str:
    images, labels = draw(name, split, 700)
    return hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()


@pytest.mark.parametrize(("name", "split"), GOLDEN)
def test_golden(name: str, split: str) -> None:
    assert _digest(name, split) == GOLDEN[name, split]


def test_the_same_without_the_vector_units_of_the_processor() -> None:
    """numpy picks its code by processor; with all of that turned off, every byte must still be the same."""
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__  # type: ignore[import-not-found]

    off = " ".join(name for name in __cpu_dispatch__ if __cpu_features__.get(name))
    code = "import test_data_embedded as t; print([t._digest(*key) == t.GOLDEN[key] for key in t.GOLDEN])"
    env = {**os.environ, "NPY_DISABLE_CPU_FEATURES": off, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[True, True, True, True]", done.stderr


@pytest.mark.parametrize(("name", "shape"), [("embedded", (1, 28, 28)), ("embedded-color", (3, 32, 32))])
def test_distribution(name: str, shape: tuple[int, int, int]) -> None:
    images, labels = draw(name, "train", 3000)
    assert images.shape == (3000, *shape)
    assert np.bincount(labels).tolist() == [300] * 10
    assert np.bincount(labels[:500]).tolist() == [50] * 10  # in every block
    assert len(np.unique(images.reshape(3000, -1), axis=0)) == 3000  # no image twice
    assert 0.1 < images.mean() / 255 < 0.6
    assert images.std() / 255 > 0.1
    other, _ = draw(name, "test", 500)
    assert not np.array_equal(other, images[:500])


@pytest.mark.parametrize("name", ["embedded", "embedded-color"])
def test_a_small_set_is_the_beginning_of_a_large_one(name: str) -> None:
    images, labels = draw(name, "test", 1200)
    for count in (1, 499, 500, 501, 777):
        few, kinds = draw(name, "test", count)
        assert np.array_equal(few, images[:count])
        assert np.array_equal(kinds, labels[:count])


@pytest.mark.parametrize(("name", "low", "high"), [("embedded", 0.35, 0.75), ("embedded-color", 0.2, 0.6)])
def test_learnable_but_not_by_comparing_with_averages(name: str, low: float, high: float) -> None:
    """The nearest class average is the simplest linear model: far better than chance (0.1), far from good."""
    images, labels = draw(name, "train", 4000)
    test, truth = draw(name, "test", 1000)
    x, t = (part.reshape(len(part), -1).astype(np.float32) for part in (images, test))
    x, t = (part - part.mean(axis=1, keepdims=True) for part in (x, t))
    means = np.stack([x[labels == kind].mean(axis=0) for kind in range(10)])
    nearest = ((t[:, None] - means[None]) ** 2).sum(axis=2).argmin(axis=1)
    assert low < float((nearest == truth).mean()) < high


def test_opening(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_OFFLINE", "1")
    data = open_data("embedded", quiet=True)
    assert (len(data.train_images), len(data.test_images), data.classes) == (12_000, 2_000, 10)
    small = open_data("embedded@600+100", quiet=True)
    assert np.array_equal(small.train_images, data.train_images[:600])
    assert small.folder == cache / "embedded@600+100"
    drawn = {path: path.stat() for path in data.folder.iterdir()}
    open_data("embedded", quiet=True)
    assert {path: path.stat().st_mtime_ns for path in data.folder.iterdir()} == {
        path: found.st_mtime_ns for path, found in drawn.items()
    }, "a set that is there is not drawn again"


def test_a_set_of_another_edition_is_drawn_again(cache: Path) -> None:
    import msgspec

    from lockstep.data.resident import read_meta, write_meta

    first = open_data("embedded@50+10", quiet=True).train_images.tobytes()
    meta = read_meta(cache / "embedded@50+10")
    write_meta(cache / "embedded@50+10", msgspec.structs.replace(meta, edition=0))
    path = cache / "embedded@50+10" / "train-images.npy"
    path.write_bytes(bytes(path.stat().st_size))
    assert open_data("embedded@50+10", quiet=True).train_images.tobytes() == first


@pytest.mark.slow
@pytest.mark.parametrize("name", ["embedded", "embedded-color"])
def test_a_small_convnet_learns_it_and_a_linear_model_does_not(name: str) -> None:
    """The promise of the documentation: about 4,000 parameters, batch 32, 3 epochs."""
    import torch
    from torch import nn

    data = open_data(name, quiet=True)
    channels, side, _ = data.shape
    flat = ((side - 2) // 2 - 2) // 2
    convnet = nn.Sequential(
        nn.Conv2d(channels, 8, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 12, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12 * flat * flat, 10),
    )  # fmt: skip
    linear = nn.Sequential(nn.Flatten(), nn.Linear(channels * side * side, 10))

    def prepared(images: np.ndarray) -> torch.Tensor:
        return (torch.tensor(np.array(images)).float() / 255 - float(np.mean(data.mean))) / data.std[0]

    def accuracy(model: nn.Module) -> float:
        x, y = prepared(data.train_images), torch.tensor(np.array(data.train_labels)).long()
        x, model = x.to(memory_format=torch.channels_last), model.to(memory_format=torch.channels_last)
        optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=True)
        for _ in range(3):
            for rows in torch.randperm(len(x)).split(32):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
        with torch.no_grad():
            guess = model(prepared(data.test_images)).argmax(1).numpy()
        return float((guess == data.test_labels).mean())

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for model in (convnet, linear):
        for layer in model:
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
    try:
        assert 0.90 < accuracy(convnet) < 0.99
        assert accuracy(linear) < 0.85
    finally:
        torch.set_num_threads(threads)
