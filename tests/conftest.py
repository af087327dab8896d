"""Fixtures of all tests; what they are made of is in support.py, which tests import by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import Cli


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)


@pytest.fixture(scope="module")
def module_cli(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    return Cli(tmp_path_factory.mktemp("lockstep"))
