"""`fused=auto`: a recipe's model gets our kernels by itself, they are compiled before its ranks start, and without a compiler one line says so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.kernels import FusedConvReLU
from lockstep.machine.native_code import compiler
from lockstep.models.nets import mnist_convnet
from lockstep.recipe import Recipe
from lockstep.run import Run
from lockstep.training import fused
from lockstep.verify.records import step_losses
from support import SHORT, Cli, assert_follows

GOLDEN = json.loads(Path(__file__).with_name("golden_losses.json").read_text())["losses"]
TINY = ("data=embedded", "train_limit=96", "test_limit=50", "global_batch=48", "epochs=1", "threads=1")
needs_compiler = pytest.mark.skipif(shutil.which(compiler()) is None, reason="there is no C++ compiler")


def layers(recipe: Recipe, device: str = "cpu") -> int:
    model = fused.applied(recipe, mnist_convnet(), torch.device(device))
    return sum(isinstance(module, FusedConvReLU) for module in model.modules())


def test_which_models_get_them() -> None:
    assert layers(Recipe()) == 2
    assert layers(Recipe(fused=False)) == 0
    assert layers(Recipe(quantize="qat")) == 0, "it needs the layers apart"
    assert layers(Recipe(), device="cuda") == 0
    assert fused.remarks(Recipe(), nn.Linear(2, 2)) == [], "nobody asked for it"


@pytest.fixture(scope="module")
def alone(module_cli: Cli) -> dict[str, Any]:
    return module_cli.run(*SHORT, "fused=auto")


@needs_compiler
@pytest.mark.parametrize(
    "words",
    [
        ("ranks=2", "strategy=ddp"),
        ("ranks=3", "backend=shm"),
        ("ranks=2", "strategy=flat", "backend=shm", "accumulation=2"),
        pytest.param(("ranks=2", "launcher=torchrun", "strategy=fsdp"), marks=pytest.mark.slow),
    ],
)
def test_they_compute_the_same_wherever_ranks_are(
    module_cli: Cli, alone: dict[str, Any], words: tuple[str, ...]
) -> None:
    """A rank's share is another batch, which may have other kernels, and so another rounding."""
    divided = module_cli.run(*SHORT, "fused=auto", *words)
    assert divided["ranks_agree"]
    assert_follows(*(step_losses(Run(Path(run["run"]))) for run in (divided, alone)), both_rounded=True)


@needs_compiler
def test_they_follow_double_precision(alone: dict[str, Any]) -> None:
    assert_follows(step_losses(Run(Path(alone["run"]))), GOLDEN)


@needs_compiler
def test_the_times_that_chose_the_kernels_are_kept_with_the_run(cli: Cli) -> None:
    auto, plain = (Path(cli.run(*TINY, *words)["run"]) for words in ((), ("fused=false",)))
    assert (auto / "kernels.json").exists()
    assert not (plain / "kernels.json").exists()


def test_without_a_compiler_one_line_says_so(cli: Cli) -> None:
    done = cli("run", *TINY, LOCKSTEP_DATA=str(cli.folder / "data"), CXX="no-such-compiler")
    assert done.returncode == 0, done.stderr
    said = " ".join((done.stdout + done.stderr).split())
    assert (
        said.count("fused=auto: PyTorch's own operators compute, since there is no C++ compiler (no-such-compiler)")
        == 1
    )
    assert "compiling" not in said


@pytest.mark.slow
@needs_compiler
def test_the_first_run_of_a_machine_compiles_them_and_says_so(cli: Cli) -> None:
    cache = {"LOCKSTEP_DATA": str(cli.folder / "data")}
    first, second = (cli("run", *TINY, **cache) for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert first.stderr.count("compiling the fused kernels, once for this machine") == 1
    assert "compiling" not in second.stderr
