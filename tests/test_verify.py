"""`lockstep verify` passes where the mathematics is right, and fails loudly where it was broken on purpose."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from lockstep import verify
from lockstep.launch import execute, mpirun, prepare
from lockstep.run import Options, Run
from lockstep.settings import load
from support import Cli

WORDS = ("data=embedded", "global_batch=24", "optimizer.lr=0.005", "backend=gloo")

BROKEN = {
    # Every rank keeps its own gradients: no exchange at all.
    "no_exchange": "self.gradient_scale = 2.0\n        self.exchange = None",
    # The sum is taken, but divided by the ranks once more: averages by rank, not by sample.
    "wrong_average": "self.gradient_scale = 1.0\n        self.exchange = lambda: [(dist.all_reduce(p.grad), p.grad.div_(2)) for p in model.parameters()]",
    # One rank's update is one per cent too large: small, and different on every rank.
    "one_per_cent": "self.gradient_scale = 1.0\n        self.exchange = lambda: [(dist.all_reduce(p.grad), p.grad.mul_(1 + 0.01 * (dist.get_rank() == 0))) for p in model.parameters()]",
}

STRATEGY = """
from contextlib import nullcontext
import torch.distributed as dist

class Own:
    def __init__(self, model, placement, device):
        self.model = model
        {body}

    def no_exchange(self):
        return nullcontext()
"""


def test_verify_passes(cli: Cli) -> None:
    result = cli("verify", *WORDS, "launcher=spawn", "--json")
    assert result.returncode == 0, result.stderr
    checks = json.loads(result.stdout)
    assert len(checks) == 14
    assert all(check["passed"] for check in checks)
    assert 0 < max(check["difference"] for check in checks) < 1e-4, "rounding is seen, so something was compared"


def test_verify_catches_a_rank_that_is_one_per_cent_off(cli: Cli) -> None:
    (cli.folder / "own.py").write_text(STRATEGY.format(body=BROKEN["one_per_cent"]))
    result = cli("verify", *WORDS, "strategy=own.py:Own")
    assert result.returncode == 3
    assert "DIFFERENT" in result.stdout
    assert "do NOT compute the same" in result.stderr
    assert "gradients of the first batch" in result.stderr


def has_shm() -> bool:
    return sys.platform == "linux" and os.uname().machine == "x86_64"


def captured(folder: Path, which: str, *words: str) -> Run:
    """One of the runs that verify makes, as it makes it."""
    recipe, placement = load([], [*WORDS, "ranks=2", "threads=1", *words])
    recipe = verify.short_recipe(recipe)
    where, spec = prepare(
        recipe,
        verify.placements(recipe, placement)[which],
        Options(capture_gradients=True, save_model=False),
        folder,
    )
    return execute(where, spec)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return captured(tmp_path_factory.mktemp("verify"), "1 process")


def compared(one: Run, other: Run) -> dict[str, bool]:
    """The very checks of verify between two of its runs."""
    return {check.what: check.passed for check in verify._same_mathematics(one, other, "1 process", "2 ranks")}


@pytest.mark.parametrize("fault", ["no_exchange", "wrong_average"])
def test_the_comparison_finds_a_broken_average(tmp_path: Path, one_process: Run, fault: str) -> None:
    (tmp_path / "own.py").write_text(STRATEGY.format(body=BROKEN[fault]))
    two = captured(tmp_path, "2 ranks", f"strategy={tmp_path / 'own.py'}:Own")
    assert not compared(one_process, two)["gradients of the first batch"]
    assert all(compared(one_process, one_process).values())


def test_a_right_strategy_of_ones_own_passes_by_torchrun_too(tmp_path: Path, one_process: Run) -> None:
    body = "self.gradient_scale = 1.0\n        self.exchange = lambda: [dist.all_reduce(p.grad) for p in model.parameters()]"
    (tmp_path / "own.py").write_text(STRATEGY.format(body=body))
    two = captured(tmp_path, "2 ranks", f"strategy={tmp_path / 'own.py'}:Own", "launcher=torchrun")
    assert all(compared(one_process, two).values())


@pytest.mark.parametrize(
    ("launcher", "backend"),
    [
        pytest.param(
            "spawn", "shm", marks=pytest.mark.skipif(not has_shm(), reason="the shm backend is for Linux on x86")
        ),
        pytest.param(
            "mpirun",
            "mpi",
            marks=pytest.mark.skipif(not mpirun.library_kind(), reason="needs MPI: pip install 'lockstep[mpi]'"),
        ),
    ],
)
def test_the_other_backends_pass(tmp_path: Path, one_process: Run, launcher: str, backend: str) -> None:
    for which in ("2 ranks", "2 ranks, accumulation 2"):
        found = captured(tmp_path / which, which, f"launcher={launcher}", f"backend={backend}")
        assert len(compared(one_process, found)) == 4
        assert all(compared(one_process, found).values())
        assert (found.summary() or {})["ranks_agree"]


def test_verify_needs_something_to_compare(cli: Cli) -> None:
    assert "ranks=1: there is nothing to compare" in cli.error("verify", *WORDS, "ranks=1", code=2)
