"""The recipes of CONTRIBUTING.md, followed: the smallest real example of each thing that people add.

A strategy is in tests/test_strategies.py, which runs the example of docs/strategies.md.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_type_hints

import msgspec
import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep import metrics
from lockstep import placement as placements
from lockstep.backends import group
from lockstep.backends.costs import plan as costs
from lockstep.backends.ranks import TABLES, Rank, environment_for
from lockstep.explain import ANALYZERS, explain
from lockstep.explain.evidence import Evidence
from lockstep.explain.finding import Analyzer, Finding
from lockstep.launch.base import Start, default_environment, thread_environment, worker_argv
from lockstep.launch.launchers import LAUNCHERS
from lockstep.measure.view import view
from lockstep.metrics import METRICS, Metric
from lockstep.run import Run, Spec
from lockstep.strategies import STRATEGIES
from lockstep.study import make, read, run_study

ROOT = Path(__file__).parents[1]
SMALL = lockstep.Recipe(data="embedded", train_limit=64, test_limit=32, global_batch=32, epochs=1)
TWO = lockstep.Placement(ranks=2, threads=1, backend="gloo", launcher="spawn")


@pytest.fixture(scope="module")
def a_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return lockstep.run(SMALL, TWO, runs=tmp_path_factory.mktemp("runs"))


def recipes() -> dict[str, list[str]]:
    """The recipes of the page, by what they add: their lines."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    parts = re.split(r"^### (.+)$", text.split("## How to add")[1].split("\n## ")[0], flags=re.MULTILINE)[1:]
    return {name: body.strip().splitlines() for name, body in zip(parts[::2], parts[1::2], strict=True)}


def test_recipes_are_short_and_name_a_test() -> None:
    assert list(recipes()) == ["A strategy", "A launcher", "A backend", "An analyzer", "A metric", "A study"]
    for name, lines in recipes().items():
        assert len(lines) <= 6, name
        file, test = re.findall(r"`(tests/\w+\.py)::(\w+)`", " ".join(lines))[-1]
        assert f"def {test}(" in (ROOT / file).read_text(), name


def test_files_that_recipes_name_exist() -> None:
    for name, lines in recipes().items():
        for path in re.findall(r"`((?:\w+/)*\w+\.py)`", " ".join(lines)):
            assert (ROOT / path).exists() or (ROOT / "src/lockstep" / path).exists(), f"{name}: {path}"


# --- a launcher --------------------------------------------------------------------------------------------------------------


def nice_starts(spec: Spec, folder: Path, host_index: int) -> list[Start]:
    """One process for each rank, with a lower priority."""
    ranks, placement = spec.plan.ranks, spec.placement
    return [
        Start(
            argv=["nice", *worker_argv(folder)],
            environment=environment_for(Rank(rank, ranks, rank, ranks)) | thread_environment(placement),
            defaults=default_environment(placement),
            rank=rank,
        )
        for rank in range(ranks)
    ]


def test_a_launcher(a_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAUNCHERS, "spawn", nice_starts)
    run = lockstep.run(SMALL, TWO, runs=tmp_path)
    assert all("nice" in command for command in run.spec().command)
    summary, usual = run.summary(), a_run.summary()
    assert summary is not None
    assert usual is not None
    assert summary["weights_sha256"] == usual["weights_sha256"]


def test_every_strategy_has_its_rows() -> None:
    assert set(placements.STRATEGIES) == STRATEGIES.keys()


def test_every_launcher_has_its_rows() -> None:
    assert set(placements.LAUNCHERS) == TABLES.keys() == LAUNCHERS.keys()


# --- a backend ---------------------------------------------------------------------------------------------------------------

LOOPBACK = '''
from lockstep.backends.python_group import PythonGroup, register as known
from lockstep.backends.work import Done

calls = []

class Loopback(PythonGroup):
    """A group of one rank: it has nothing to exchange."""

    backend_name = "loopback"

    def allreduce(self, tensors, opts=None):
        calls.append("allreduce")
        return Done(tensors)

    def barrier(self, opts=None):
        return Done([])

def create(options, backend_options=None):
    return Loopback(options.store, options.group_rank, options.group_size)

def register():
    return known("loopback", create)
'''


@pytest.fixture
def loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    (tmp_path / "loopback_backend.py").write_text(LOOPBACK)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(group.OWN, "loopback", "loopback_backend")
    placement = msgspec.structs.replace(TWO, backend="loopback", ranks=1)
    group.join(placement, Rank(0, 1, 0, 1), tmp_path)
    yield sys.modules["loopback_backend"].calls
    group.leave()


def test_a_backend(loopback: list[str]) -> None:
    assert dist.get_backend() == "loopback"
    values = torch.tensor([1.0, 2.0])
    dist.all_reduce(values)
    assert values.tolist() == [1, 2]
    assert group.reduce_sum([3.0]) == [3.0]
    assert loopback == ["allreduce", "allreduce"]


def test_every_backend_has_its_rows() -> None:
    names = set(get_args(get_type_hints(lockstep.Placement)["backend"])) - {"auto"}
    assert names == set(costs.BACKENDS)
    assert group.OWN.keys() <= names


# --- an analyzer -------------------------------------------------------------------------------------------------------------


def step_time(evidence: Evidence) -> list[Finding]:
    """Training time over the number of steps."""
    seconds = float(evidence.summary["train_seconds"]) / evidence.spec.plan.total_steps
    return [Finding(verdict="measured", why=f"{seconds:.3f} s a step", figures={"seconds": seconds})]


def test_an_analyzer(a_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Analyzer("step-time", "How long is a step?", "Training time over the number of steps.", step_time)
    monkeypatch.setattr(sys.modules["lockstep.explain"], "ANALYZERS", (*ANALYZERS, mine))
    (found,) = explain(Evidence(a_run), ("step-time",))
    assert found.figures["seconds"] > 0
    assert "step-time" in [finding.question for finding in explain(Evidence(a_run))]


# --- a metric ----------------------------------------------------------------------------------------------------------------


def test_a_metric(a_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    epochs = Metric("epochs", "size", "number", of=lambda run, target: float(len(run.epochs())))
    monkeypatch.setitem(METRICS, "epochs", epochs)
    assert metrics.value(view(a_run), "epochs", None) == 1
    assert epochs.better == "less"
    assert make("mine", SMALL, TWO, factors={"ranks": [1, 2]}, metrics=["epochs"]).metrics == ["epochs"]


# --- a study -----------------------------------------------------------------------------------------------------------------

STUDY = """
about = "One rank against two."
repeats = 2
baseline = "ranks=1"
metrics = ["accuracy"]
[recipe]
data = "embedded"
train_limit = 64
test_limit = 32
global_batch = 32
epochs = 1
[placement]
threads = 1
backend = "gloo"
[factors]
ranks = [1, 2]
"""


def test_a_study(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(STUDY)
    mine = read(tmp_path / "mine.toml")
    document = run_study(mine, runs=tmp_path / "runs")
    assert [cell["done"] for cell in document["cells"]] == [2, 2]
    assert not any(cell["failed"] for cell in document["cells"])
