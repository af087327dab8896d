"""torch.compile as an option: it really compiles, computes the same, and its time is no part of an epoch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import InputError
from lockstep.machine import inductor
from support import SHORT, Cli, train_here

pytestmark = pytest.mark.slow


@pytest.mark.slow
def test_a_compiled_run_computes_the_same_and_measures_its_compile_time_apart(cli: Cli, alone: dict[str, Any]) -> None:
    # No partial batch and no partial evaluation: one size to compile for each. Plain SGD, because Adam's first steps divide a gradient by its
    # own size, rounding included.
    words = (
        "train_limit=96",
        "test_limit=100",
        "epochs=1",
        "regularize.dropout=0.2",
        "optimizer.name=sgd",
        "optimizer.lr=0.1",
    )
    found = cli("run", *SHORT, "threads=1", *words, "compile=true", "--json", timeout=230, TORCH_LOGS="recompiles")
    assert found.returncode == 0, found.stderr

    compiled = json.loads(found.stdout)
    eager = train_here(cli.runs, *SHORT, *words)
    # The longest sums, a weight's gradient over 48 images of 28x28, are off by about 6e-8 times the root of their 38 thousand terms: 1.2e-5.
    assert compiled["train_loss"] == pytest.approx(eager["train_loss"], rel=1.2e-5)
    assert compiled["test_loss"] == pytest.approx(eager["test_loss"], rel=1.2e-5)
    assert compiled["compile_seconds"] > 1
    log = (Path(compiled["run"]) / "ranks" / "0000" / "log.txt").read_text()
    assert log.count("Recompiling") == 1, f"once for evaluation, never in an epoch: {log}"
    assert alone["compile_seconds"] == 0


@pytest.mark.parametrize("theirs", ["", "their/folder"])
def test_code_of_another_instruction_set_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, theirs: str
) -> None:
    monkeypatch.setenv("LOCKSTEP_DATA", str(tmp_path / "data"))
    around = tmp_path / (theirs or "inductor")
    chosen = []
    for capability in ("default", "avx2"):
        monkeypatch.setenv(inductor.FOLDER, str(around) if theirs else "")
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", capability)
        for _ in range(2):  # by the launcher, and by its ranks
            inductor.choose_folder()
        chosen.append(Path(os.environ[inductor.FOLDER]))
    assert chosen[0] != chosen[1]
    assert all(folder.is_dir() and folder.parent == around for folder in chosen)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inductor").write_text("a file")
    monkeypatch.setenv("LOCKSTEP_DATA", str(tmp_path / "data"))
    monkeypatch.setenv(inductor.FOLDER, "")
    with pytest.raises(InputError, match=r"cannot be written .*: set LOCKSTEP_DATA or TORCHINDUCTOR_CACHE_DIR"):
        inductor.choose_folder()


def test_a_failure_quotes_the_first_error_of_the_compiler(cli: Cli) -> None:
    """A compiler that compiles the probes of Inductor, and none of its kernels."""
    broken = cli.folder / "c++"
    broken.write_text(
        "#!/bin/sh\n"
        'case "$*" in *.main.cpp*) echo "main.cpp: In a function:\nmain.cpp:1:2: error: no such word\nmain.cpp:3:4: error: nor this" >&2; exit 1;; esac\n'
        'exec g++ "$@"\n'
    )
    broken.chmod(0o755)
    cli.environment |= {"CXX": str(broken), inductor.FOLDER: str(cli.folder / "inductor")}
    message = cli.error("run", *SHORT, "threads=1", "train_limit=48", "test_limit=48", "compile=true", code=3)
    assert "main.cpp:1:2: error: no such word; what was measured" in message


def test_without_a_compiler_it_says_so(cli: Cli) -> None:
    folder = cli.folder / "empty"
    folder.mkdir()
    cli.environment["PATH"] = str(folder)
    message = cli.error("run", *SHORT, "threads=1", "compile=true", code=2)
    assert "compile=true needs a C++ compiler" in message
