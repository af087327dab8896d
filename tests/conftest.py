"""Fixtures of all tests; what they are made of is in support.py, which tests import by name."""

from __future__ import annotations

import compileall
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import hypothesis
import pytest

import slurm_cluster
from house import ROOT
from lockstep.data.store import is_offline
from lockstep.files import locked
from lockstep.text import last_line
from slurm_cluster import Cluster
from support import SHORT, Cli, processes_of

# Two workers share the cores: threads that wait for each other by spinning would keep the other one's tests from them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Python's readline, which a test runner imports, sets these; what is printed into a pipe is of another width.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)

# A shell that starts something in the background has it ignore Ctrl-C, nohup has it ignore a closed terminal, and so does all that is
# started from there: tests send both.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


# No example is judged by a clock: the machine may be busy.
hypothesis.settings.register_profile("no clock", deadline=None)
hypothesis.settings.load_profile("no clock")

# A worker has all tests of a file, because they share what takes seconds to start. The longest files go first, so that the
# others can fill up what is left.
LONGEST = (
    "test_verify.py",
    "test_docs_commands.py",
    "test_verify_foreign.py",
    "test_docs.py",
    "test_capabilities.py",
    "test_lab_check.py",
    "test_hang.py",
    "test_model_features.py",
    "test_hsdp.py",
    "test_slurm.py",
    "test_faults.py",
    "test_strategies.py",
    "test_shm.py",
    "test_comms.py",
    "test_mpi.py",
    "test_emulated.py",
    "test_torch_suite.py",
    "test_cli.py",
    "test_session.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """Tests start over a thousand processes. Where Python may not write what it compiled, each would compile Lockstep anew."""
    if not hasattr(config, "workerinput"):
        for folder in ("src", "tests"):
            compileall.compile_dir(Path(__file__).parents[1] / folder, quiet=2)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


ZYGOTE = pytest.StashKey["Zygote"]()


class Zygote:
    """The process that has imported torch and forks those that tests start (tests/zygote/server.py)."""

    def __init__(self) -> None:
        home = Path(__file__).parent / "zygote"
        self._folder = tempfile.TemporaryDirectory(prefix="lockstep-zygote-")
        self._address = f"{self._folder.name}/socket"
        os.environ["PYTHONPATH"] = os.pathsep.join([str(home), *filter(None, [os.environ.get("PYTHONPATH")])])
        argv = [sys.executable, str(home / "server.py"), self._address]
        self._server = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._ready = False

    def address(self) -> str:
        """Where it can be asked; the first time, wait until it has imported torch."""
        if not self._ready:
            assert self._server.stdout
            assert self._server.stdout.readline() == "ready\n", "the zygote could not start"
            self._ready = True
        return self._address

    def close(self) -> None:
        self._server.communicate(timeout=30)
        self._folder.cleanup()


def pytest_sessionstart(session: pytest.Session) -> None:
    hands_out = session.config.option.numprocesses and not hasattr(session.config, "workerinput")
    if not hands_out and not os.environ.get("LOCKSTEP_TEST_COLD"):
        session.config.stash[ZYGOTE] = Zygote()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if ZYGOTE in session.config.stash:
        session.config.stash[ZYGOTE].close()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Processes of this test are forked by the zygote, unless it is marked `cold`."""
    os.environ.pop("LOCKSTEP_TEST_ZYGOTE", None)
    if ZYGOTE in item.config.stash and not item.get_closest_marker("cold"):
        os.environ["LOCKSTEP_TEST_ZYGOTE"] = item.config.stash[ZYGOTE].address()


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


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process that trains SHORT: what runs in other places are compared with. Trained once for all files."""
    return Cli(tmp_path_factory.mktemp("alone")).run(*SHORT)


FRAMEWORKS = ("lightning", "accelerate", "transformers", "tensorboard")


@pytest.fixture(scope="session")
def frameworks() -> Path:
    """A Python with the newest of each, beside the torch that is pinned, and without Lockstep. It stays, for the next time."""
    folder = ROOT / ".frameworks-venv"
    python = folder / "bin/python"
    with locked(ROOT / ".frameworks-venv.lock", "installing other trainers"):
        stamp = folder / f".installed-{'-'.join(FRAMEWORKS)}"
        if not stamp.exists():
            pinned = next(
                line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")
            )
            environment = {**os.environ, "PIP_CONSTRAINT": str(ROOT / "constraints.txt"), "LOCKSTEP_TEST_COLD": "1"}
            install = [str(python), "-m", "pip", "install", "--quiet"]
            for words in ([sys.executable, "-m", "venv", str(folder)], [*install, pinned], [*install, *FRAMEWORKS]):
                made = subprocess.run(words, env=environment, capture_output=True, text=True)
                if made.returncode:
                    said = f"{' and '.join(FRAMEWORKS)} cannot be installed: {last_line(made.stderr)}"
                    if is_offline():
                        pytest.skip(said)
                    pytest.fail(f"{said}; LOCKSTEP_OFFLINE=1 skips what needs them")
            stamp.touch()
    return python


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 8 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    argv = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    mounted = subprocess.run(argv, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"mounting a small file system needs root: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    reason = slurm_cluster.missing()
    if reason:
        pytest.skip(reason)
    with slurm_cluster.running() as started:
        yield started
    assert not processes_of(started.folder)
    assert not started.processes(), "the cluster has stopped"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A real one; without it the tests that look at pages are skipped and say so."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright")
    known = ("chromium", "chromium-browser", "google-chrome")
    path = os.environ.get("LOCKSTEP_BROWSER") or next(filter(None, map(shutil.which, known)), None)
    if path is None:
        pytest.skip("needs a browser: apt-get install chromium, or LOCKSTEP_BROWSER=path")
    with playwright.sync_playwright() as started:
        # Root has no sandbox; the pages are our own.
        opened = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()
