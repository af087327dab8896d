"""Downloads from a real server on loopback that cuts, refuses, lies and changes its mind."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable
from pathlib import Path

import datahelp as h
import pytest

from lockstep.data import open_data
from lockstep.data.catalog import Entry
from lockstep.data.download import RetryPolicy, Unreachable, download, part_of
from lockstep.data.logger import Logger
from lockstep.errors import DataError

Known = Callable[[Entry], Entry]
QUICK = RetryPolicy(attempts=3, backoff=0.01, timeout=2)
BODY = random.Random(5).randbytes(1_000_000)


@pytest.fixture
def big(web: h.Web) -> h.Web:
    web.files["big"] = BODY
    return web


def _get(web: h.Web, target: Path, policy: RetryPolicy = QUICK) -> bool:
    return download(web.base + "big", target, Logger(quiet=True), policy)


def test_a_cut_download_goes_on_where_it_was_cut(big: h.Web, tmp_path: Path) -> None:
    big.cut_after, big.cuts = 300_000, 3
    assert _get(big, tmp_path / "big")
    assert (tmp_path / "big").read_bytes() == BODY
    assert big.sent["big"] == len(BODY)  # not one byte twice
    assert [asked for _, asked in big.ranges] == ["bytes=300000-", "bytes=600000-", "bytes=900000-"]
    assert [path.name for path in tmp_path.iterdir()] == ["big"]


def test_progress_does_not_count_as_failure(big: h.Web, tmp_path: Path) -> None:
    big.cut_after, big.cuts = 50_000, 15  # far more cuts than attempts
    _get(big, tmp_path / "big")
    assert (tmp_path / "big").read_bytes() == BODY


def test_a_part_of_an_earlier_process_is_used(big: h.Web, tmp_path: Path) -> None:
    big.cut_after, big.cuts = 400_000, 1
    with pytest.raises(Unreachable):
        _get(big, tmp_path / "big", RetryPolicy(attempts=1))
    assert not (tmp_path / "big").exists()
    assert part_of(big.base + "big", tmp_path / "big").stat().st_size == 400_000
    assert _get(big, tmp_path / "big")
    assert (tmp_path / "big").read_bytes() == BODY
    assert big.sent["big"] == len(BODY)


@pytest.mark.parametrize("change", ["etag", "no ranges", "shorter"])
def test_a_part_that_no_longer_fits_is_not_mixed_in(big: h.Web, tmp_path: Path, change: str) -> None:
    big.cut_after, big.cuts = 400_000, 1
    with pytest.raises(Unreachable):
        _get(big, tmp_path / "big", RetryPolicy(attempts=1))
    fresh = BODY[::-1]
    if change == "shorter":
        fresh = fresh[:1000]
    else:
        big.etag = '"two"'
    if change == "no ranges":
        big.ranged = False
    big.files["big"] = fresh
    _get(big, tmp_path / "big")
    assert (tmp_path / "big").read_bytes() == fresh


def test_errors_of_the_server_are_tried_again_with_backoff(big: h.Web, tmp_path: Path) -> None:
    big.failures = 2
    started = time.monotonic()
    _get(big, tmp_path / "big", RetryPolicy(attempts=3, backoff=0.1))
    assert time.monotonic() - started >= 0.3  # 0.1 s, then 0.2 s
    assert big.requests["big"] == 3
    big.failures = 99
    with pytest.raises(Unreachable, match=r"HTTP 503.*after 3 attempts"):
        _get(big, tmp_path / "other")
    assert big.requests["big"] == 6


@pytest.mark.parametrize("status", [403, 404, 410])
def test_a_refusal_is_final(big: h.Web, tmp_path: Path, status: int) -> None:
    big.status = status
    with pytest.raises(Unreachable, match=f"HTTP {status}"):
        _get(big, tmp_path / "big")
    assert big.requests["big"] == 1


def test_a_host_that_does_not_resolve_fails_at_once(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(Unreachable, match=r"no-such-host.invalid does not resolve") as caught:
        download("http://no-such-host.invalid/x", tmp_path / "x", Logger(quiet=True), RetryPolicy())
    assert caught.value.host_down
    assert time.monotonic() - started < 5


def test_a_closed_port_fails_at_once(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(Unreachable, match="refused") as caught:
        download(f"http://127.0.0.1:{port}/x", tmp_path / "x", Logger(quiet=True), RetryPolicy())
    assert caught.value.host_down


def test_a_server_that_falls_silent_is_left(big: h.Web, tmp_path: Path) -> None:
    big.before = lambda: time.sleep(1)
    started = time.monotonic()
    with pytest.raises(Unreachable, match="timed out"):
        _get(big, tmp_path / "big", RetryPolicy(attempts=2, backoff=0.01, timeout=0.3))
    assert time.monotonic() - started < 3


def test_wrong_content_from_one_mirror_and_right_from_the_next(
    known: Known, web: h.Web, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bad = h.Web({name: content[:50] + b"?" + content[51:] for name, content in web.files.items()})
    try:
        known(h.mini((bad.base, web.base))[0])
        data = open_data("mini")
    finally:
        bad.close()
    assert data.origin == web.base
    assert bad.requests["train-images-idx3-ubyte.gz"] == 1
    error = capfd.readouterr().err
    kept = cache / ".downloads" / "mini" / "train-images-idx3-ubyte.gz.corrupt"
    assert "warning: train-images-idx3-ubyte.gz as downloaded is not used: " in error
    assert str(kept) in error
    assert kept.exists()


def test_a_login_page_instead_of_data_is_not_used(known: Known, web: h.Web, cache: Path) -> None:
    known(h.mini((web.base,))[0])
    web.files = dict.fromkeys(web.files, b"<html>Please log in</html>")
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.gz: truncated: 26 of"):
        open_data("mini")
    assert not (cache / "mini" / "meta.json").exists()


def test_a_download_put_together_wrongly_is_fetched_once_more(known: Known, web: h.Web, cache: Path) -> None:
    """A part that was spoilt on our disk: the server cannot know, the checksum does."""
    entry, _ = h.mini((web.base,))
    known(entry)
    folder = cache / ".downloads" / "mini"
    folder.mkdir(parents=True)
    name = "train-images-idx3-ubyte.gz"
    part_of(web.base + name, folder / name).write_bytes(bytes(100))
    assert open_data("mini").origin == web.base
    assert (folder / f"{name}.corrupt").exists()
    assert web.requests[name] == 2


def test_a_whole_download_of_a_killed_process_is_not_fetched_again(known: Known, web: h.Web, cache: Path) -> None:
    known(h.mini((web.base,))[0])
    name = "train-images-idx3-ubyte.gz"
    folder = cache / ".downloads" / "mini"
    folder.mkdir(parents=True)
    (folder / name).write_bytes(web.files[name])
    open_data("mini")
    assert name not in web.requests
    assert len(web.requests) == 3


def test_parts_are_never_used_as_data(known: Known, web: h.Web, cache: Path, tmp_path: Path) -> None:
    entry, files = h.mini()
    known(entry)
    root = tmp_path / "root"
    root.mkdir()
    for name, content in files.items():
        (root / f"{name}.part").write_bytes(content)
        (root / f"{name}.0123abcd.part").write_bytes(content)
    with pytest.raises(DataError):
        open_data("mini", root)


def test_plain_lines_of_progress_off_a_terminal(big: h.Web, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    download(big.base + "big", tmp_path / "big", Logger(), QUICK)
    assert capfd.readouterr().err == f"lockstep: fetching {big.base}big of 1.0 MB\n"


def test_a_download_that_is_cut_here_and_there_in_turns_is_given_up(big: h.Web, tmp_path: Path) -> None:
    """The server knows no ranges, so every attempt begins anew: that one got further than the one before is no progress."""
    big.ranged, big.cuts = False, 10**9
    lengths = iter([50_000, 20_000] * 50)

    def before() -> None:
        big.cut_after = next(lengths)

    big.before = before
    with pytest.raises(Unreachable, match=r"cut at .* \(after 3 attempts\)"):
        _get(big, tmp_path / "big")
    assert big.requests["big"] == 3


def test_a_download_that_brings_a_little_each_time_ends_too(big: h.Web, tmp_path: Path) -> None:
    big.cut_after, big.cuts = 1, 10**9
    with pytest.raises(Unreachable, match="after 20 attempts"):
        _get(big, tmp_path / "big", RetryPolicy(attempts=3, backoff=0.0, timeout=2, most=20))
