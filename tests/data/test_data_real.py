"""The real data sets, from whatever place this machine can reach; fetched into the ordinary cache once."""

from __future__ import annotations

import os
import subprocess

import datahelp as h
import numpy as np
import pytest

from lockstep.data import DataSet, open_data

pytestmark = pytest.mark.network


def _fetched(name: str, environment: dict[str, str]) -> DataSet:
    done = subprocess.run(
        [str(h.LOCKSTEP), "data", "fetch", name], env=environment, capture_output=True, text=True, timeout=200
    )
    if done.returncode == 4:
        pytest.skip(f"{name} cannot be had here: {done.stderr[-800:]}")
    assert done.returncode == 0, done.stderr
    check = subprocess.run(
        [str(h.LOCKSTEP), "data", "verify", name],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert check.returncode == 0, check.stderr
    with pytest.MonkeyPatch.context() as patch:
        for key in ("LOCKSTEP_DATA", "XDG_CACHE_HOME", "HOME"):
            if key in environment:
                patch.setenv(key, environment[key])
            elif key in os.environ:
                patch.delenv(key)
        return open_data(name, offline=True)


@pytest.fixture(scope="session")
def mnist(ordinary_environment: dict[str, str]) -> DataSet:
    return _fetched("mnist", ordinary_environment)


@pytest.fixture(scope="session")
def fashion(ordinary_environment: dict[str, str]) -> DataSet:
    return _fetched("fashion-mnist", ordinary_environment)


def test_mnist(mnist: DataSet) -> None:
    assert mnist.train_images.shape == (60_000, 1, 28, 28)
    assert mnist.test_images.shape == (10_000, 1, 28, 28)
    assert mnist.train_labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert np.bincount(mnist.test_labels).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert mnist.mean[0] == pytest.approx(0.1307, abs=5e-5)
    assert mnist.std[0] == pytest.approx(0.3081, abs=5e-5)


def test_fashion_mnist(fashion: DataSet) -> None:
    assert np.bincount(fashion.train_labels).tolist() == [6000] * 10
    assert fashion.class_names[int(fashion.train_labels[0])] == "ankle boot"
    assert fashion.mean[0] == pytest.approx(0.2860, abs=5e-5)
    assert fashion.std[0] == pytest.approx(0.3530, abs=5e-5)


def test_the_two_are_told_apart(mnist: DataSet, tmp_path_factory: pytest.TempPathFactory) -> None:
    """MNIST's own files offered as Fashion-MNIST: same names, same sizes, other content."""
    from lockstep.data.catalog import FASHION, MNIST
    from lockstep.data.encode import parts_of
    from lockstep.data.sources import Collected, from_folder

    arrays = {
        "train-images": mnist.train_images,
        "train-labels": mnist.train_labels,
        "test-images": mnist.test_images,
        "test-labels": mnist.test_labels,
    }
    files = {part.name: content for part, content in parts_of(MNIST, arrays)}
    root = h.lay_out(tmp_path_factory.mktemp("root"), files)
    assert from_folder(Collected(MNIST), root, "here") == []
    bad = from_folder(Collected(FASHION), root, "here")
    assert {reason for _, reason in bad} == {"this is the file of mnist, not the one asked for"}
