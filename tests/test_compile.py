"""torch.compile as an option: it really compiles, computes the same, and its time is no part of an epoch."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support import SHORT, Cli, train_here

pytestmark = pytest.mark.slow


@pytest.mark.slow
def test_a_compiled_run_computes_the_same_and_measures_its_compile_time_apart(cli: Cli, alone: dict[str, Any]) -> None:
    # No partial batch and no partial evaluation: one size to compile for each.
    words = ("train_limit=96", "test_limit=100", "epochs=1", "regularize.dropout=0.2")
    found = cli("run", *SHORT, "threads=1", *words, "compile=true", "--json", timeout=230)
    assert found.returncode == 0, found.stderr

    compiled = json.loads(found.stdout)
    eager = train_here(cli.runs, *SHORT, *words)
    assert compiled["train_loss"] == pytest.approx(eager["train_loss"], rel=1e-4)
    assert compiled["test_loss"] == pytest.approx(eager["test_loss"], rel=1e-4)
    assert compiled["compile_seconds"] > 1
    assert compiled["train_seconds"] < compiled["compile_seconds"]
    assert alone["compile_seconds"] == 0


def test_without_a_compiler_it_says_so(cli: Cli) -> None:
    folder = cli.folder / "empty"
    folder.mkdir()
    cli.environment["PATH"] = str(folder)
    message = cli.error("run", *SHORT, "threads=1", "compile=true", code=2)
    assert "compile=true needs a C++ compiler" in message
