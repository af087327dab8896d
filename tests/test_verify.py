"""`lockstep verify` passes where the mathematics is right, and fails loudly where it was broken on purpose."""

from __future__ import annotations

import json

import pytest

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


@pytest.mark.parametrize("launcher", ["spawn", "torchrun"])
def test_verify_passes(cli: Cli, launcher: str) -> None:
    result = cli("verify", *WORDS, f"launcher={launcher}", "--json")
    assert result.returncode == 0, result.stderr
    checks = json.loads(result.stdout)
    assert len(checks) == 14
    assert all(check["passed"] for check in checks)
    assert 0 < max(check["difference"] for check in checks) < 1e-4, "rounding is seen, so something was compared"


def test_a_right_strategy_of_ones_own_passes(cli: Cli) -> None:
    body = "self.gradient_scale = 1.0\n        self.exchange = lambda: [dist.all_reduce(p.grad) for p in model.parameters()]"
    (cli.folder / "own.py").write_text(STRATEGY.format(body=body))
    result = cli("verify", *WORDS, "strategy=own.py:Own")
    assert result.returncode == 0, result.stderr + result.stdout


@pytest.mark.parametrize("fault", BROKEN)
def test_verify_catches_a_broken_average(cli: Cli, fault: str) -> None:
    (cli.folder / "own.py").write_text(STRATEGY.format(body=BROKEN[fault]))
    result = cli("verify", *WORDS, "strategy=own.py:Own")
    assert result.returncode == 3
    assert "DIFFERENT" in result.stdout
    assert "do NOT compute the same" in result.stderr
    assert "gradients of the first batch" in result.stderr


def test_verify_needs_something_to_compare(cli: Cli) -> None:
    assert "ranks=1: there is nothing to compare" in cli.error("verify", *WORDS, "ranks=1", code=2)
