"""Fixtures of all tests; what they are made of is in support.py, which tests import by name."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from support import Cli, processes_of

# A shell that starts something in the background has it ignore Ctrl-C, and all that it starts as well: tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Tests of these files share something that takes seconds to start: one worker gets all of them. They go first, so that the
# many short tests can fill up what is left.
TOGETHER = {
    "test_slurm.py": "slurm",
    "test_study_slurm.py": "slurm",
    "test_shm.py": "shm",
    "test_strategies.py": "strategies",
    "test_regularize.py": "regularize",
    "test_session.py": "session",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        group = TOGETHER.get(item.path.name)
        if group:
            item.add_marker(pytest.mark.xdist_group(group))
    order = [*TOGETHER]
    items.sort(key=lambda item: order.index(item.path.name) if item.path.name in order else len(order))


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    yield Cli(tmp_path)
    # A test that failed half-way must not leave a run that slows down all the others.
    for pid in processes_of(tmp_path):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def module_cli(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    return Cli(tmp_path_factory.mktemp("lockstep"))
