"""The cache: what is noticed on opening, what is moved aside, what is cleared."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import datahelp as h
import pytest

from lockstep.data import open_data, resident, store
from lockstep.data.catalog import Entry
from lockstep.errors import DataError, InputError
from lockstep.machine.cache import cache_folder

Known = Callable[[Entry], Entry]


@pytest.mark.parametrize("name", [f"{array}.npy" for array in resident.ARRAYS])
def test_a_truncated_cache_is_noticed_on_open_moved_aside_and_made_again(
    cache: Path, known: Known, web: h.Web, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    known(h.mini((web.base,))[0])
    before = open_data("mini").train_images.tobytes()
    bad = cache / "mini" / name
    whole = bad.read_bytes()
    bad.write_bytes(whole[:-1])
    capfd.readouterr()
    assert open_data("mini").train_images.tobytes() == before
    assert bad.read_bytes() == whole
    assert bad.with_name(f"{name}.corrupt").read_bytes() == whole[:-1]
    error = capfd.readouterr().err
    assert f"{bad} is not used: truncated: {len(whole) - 1:,} bytes instead of {len(whole):,}" in error
    assert f"Moved aside to {bad}.corrupt" in error
    bad.write_bytes(b"")
    open_data("mini")
    assert bad.with_name(f"{name}.corrupt.2").read_bytes() == b""  # and the first one is still there
    assert bad.with_name(f"{name}.corrupt").exists()


def test_a_bad_cache_without_a_source_is_not_used(cache: Path, known: Known, web: h.Web) -> None:
    known(h.mini((web.base,))[0])
    open_data("mini")
    bad = cache / "mini" / "train-images.npy"
    bad.write_bytes(bad.read_bytes()[:200])
    for _ in range(2):
        with pytest.raises(DataError, match=r"train-images.npy"):
            open_data("mini", offline=True)
    assert bad.with_name("train-images.npy.corrupt").stat().st_size == 200
    assert len(open_data("mini").train_images) == 40


@pytest.mark.parametrize("meta", [b"", b"{}", b"[1]", b"\xff\xfe"])
def test_a_bad_meta_file_is_moved_aside(cache: Path, known: Known, web: h.Web, meta: bytes) -> None:
    known(h.mini((web.base,))[0])
    open_data("mini")
    (cache / "mini" / "meta.json").write_bytes(meta)
    assert len(open_data("mini").train_images) == 40
    assert (cache / "mini" / "meta.json.corrupt").read_bytes() == meta


def test_arrays_of_the_right_size_and_wrong_form_are_noticed(cache: Path, known: Known, web: h.Web) -> None:
    known(h.mini((web.base,))[0])
    open_data("mini")
    path = cache / "mini" / "train-images.npy"
    path.write_bytes(path.read_bytes().replace(b"(40, 1, 6, 5)", b"(40, 1, 5, 6)"))
    found = resident.open_folder(cache / "mini")
    assert isinstance(found, resident.Damage)
    assert "(40, 1, 5, 6)" in found.reason
    assert open_data("mini").shape == (1, 6, 5)


def test_a_cache_that_cannot_be_written_names_the_setting(
    tmp_path: Path, known: Known, web: h.Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    known(h.mini((web.base,))[0])
    (tmp_path / "file").write_text("in the way")
    for place in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/no/such")):
        monkeypatch.setenv("LOCKSTEP_DATA", str(place))
        with pytest.raises(InputError, match="LOCKSTEP_DATA") as caught:
            open_data("mini")
        assert "\n" not in str(caught.value)


def test_a_finished_cache_is_opened_without_writing_a_thing(
    cache: Path, known: Known, web: h.Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a cache that an administrator filled can be read-only."""
    known(h.mini((web.base,))[0])
    open_data("mini")
    for folder in (".locks", ".tmp", ".downloads"):
        shutil.rmtree(cache / folder)
    before = sorted(cache.rglob("*"))
    monkeypatch.setattr(store, "locked", None)  # taking the lock would fail
    assert len(open_data("mini").train_images) == 40
    assert sorted(cache.rglob("*")) == before


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("LOCKSTEP_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "lockstep" / "data"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "lockstep" / "data"


def test_downloads_are_cleared_once_the_set_is_made(cache: Path, known: Known, web: h.Web) -> None:
    known(h.mini((web.base,))[0])
    open_data("mini")
    assert not list((cache / ".downloads").rglob("*.gz*"))
    assert not list((cache / ".tmp").iterdir())
