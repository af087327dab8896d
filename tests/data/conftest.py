"""Every data test has a cache of its own; the real data sets use the ordinary one, and are fetched once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import datahelp
import pytest

from lockstep.data import catalog, collect
from lockstep.data.catalog import Entry
from lockstep.data.download import RetryPolicy

ORDINARY = dict(os.environ)


@pytest.fixture(scope="session")
def ordinary_environment() -> dict[str, str]:
    """The environment as the user has it, with the ordinary cache."""
    return ORDINARY


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def _own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_DATA", str(cache))
    monkeypatch.delenv("LOCKSTEP_OFFLINE", raising=False)
    monkeypatch.setattr(collect, "RETRY_POLICY", RetryPolicy(attempts=3, backoff=0.02, timeout=5))
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Callable[[Entry], Entry]:
    """Puts an entry into the catalog for the time of a test."""

    def add(entry: Entry) -> Entry:
        monkeypatch.setitem(catalog.CATALOG, entry.name, entry)
        return entry

    return add


@pytest.fixture
def web() -> Iterator[datahelp.Web]:
    """A server with the files of the usual small set, gzipped."""
    import gzip

    _, files = datahelp.mini()
    server = datahelp.Web({f"{name}.gz": gzip.compress(content, 1) for name, content in files.items()})
    yield server
    server.close()
