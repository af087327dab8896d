"""What tests share: the command line through a real process, and short recipes on data that need no network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lockstep.measure.records import read_steps
from lockstep.run import Run

if TYPE_CHECKING:  # torch takes a second
    from torch import Tensor, nn

# Fourteen global batches of 48 and a partial one of 31, which no number of ranks divides. Backend and kernels are stated, because
# "auto" depends on what was measured on the machine; kernels of ours, in other places, are in test_fused_auto.py.
SHORT = (
    "data=embedded",
    "train_limit=703",
    "test_limit=501",
    "global_batch=48",
    "epochs=2",
    "optimizer.lr=0.005",
    "seed=7",
    "backend=gloo",
    "threads=1",
    "fused=false",
)


class Cli:
    """Calls `lockstep` as a user does: in a process of its own, through the installed entry point."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = folder / "runs"
        self.environment = {**os.environ, "LOCKSTEP_RUNS": str(self.runs), "NO_COLOR": "1"}

    def argv(self, *words: str) -> list[str]:
        return [str(Path(sys.executable).absolute().with_name("lockstep")), *words]

    def __call__(self, *words: str, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.argv(*words),
            env={**self.environment, **environment},
            cwd=self.folder,
            text=True,
            capture_output=True,
            timeout=timeout,
        )

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.argv(*words),
            env=self.environment,
            cwd=self.folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def started(self, *words: str) -> tuple[subprocess.Popen[str], Run]:
        """A run that has taken its first steps on every rank. The first of this command line's folder."""
        process = self.start("run", *words)
        run = wait_for(lambda: next((Run(p.parent) for p in self.runs.glob("*/run.json")), None), what="the run folder")
        ranks = run.spec().plan.ranks
        wait_for(
            lambda: (
                all(len(read_steps(run.rank_folder(rank) / "steps.bin")) > 20 for rank in range(ranks))
                and len(run.rank_statuses()) == ranks
            ),
            seconds=120,  # Ray takes its time to start
            what="steps on every rank",
        )
        return process, run

    def run(self, *words: str) -> dict[str, Any]:
        """A run that must succeed, as its JSON document."""
        result = self("run", *words, "--json")
        assert result.returncode == 0, result.stderr
        document: dict[str, Any] = json.loads(result.stdout)
        return document

    def error(self, *words: str, code: int) -> str:
        """A call that must fail in the user's own terms: exit code, one line, no traceback."""
        result = self(*words)
        assert result.returncode == code, (result.returncode, result.stdout, result.stderr)
        assert "Traceback" not in result.stderr + result.stdout
        lines = [line for line in result.stderr.splitlines() if line.startswith("lockstep: ")]
        assert lines, result.stderr
        return lines[-1].removeprefix("lockstep: ")


def train_here(folder: Path, *words: str, resume: str | None = None, **options: Any) -> dict[str, Any]:
    """What `Cli.run` gives, computed by one rank that is this very process: a reference need not start another.

    `resume` names the run folder to go on from; `options` are those of `lockstep.run.Options`.
    """
    import torch

    from lockstep.backends.ranks import Rank
    from lockstep.launch import prepare
    from lockstep.launch.resume import resumed
    from lockstep.run import Options
    from lockstep.settings import load
    from lockstep.training.context import Context
    from lockstep.worker import _train

    settings = resumed(Run(Path(resume)), words) if resume else load([], words)
    run, spec = prepare(*settings, Options(resume_from=resume, **options), runs=folder)
    torch.set_num_threads(spec.placement.threads or 1)
    _train(Context(run, spec, Rank(0, 1, 0, 1), torch.device("cpu")))
    return {**(run.summary() or {}), "run": str(run.folder), "id": run.id, "epochs": run.epochs()}


# How far a float32 run of SHORT may be from the same run in float64, relative to the loss. While nothing is decided by rounding it stays at
# 1e-7 for all 30 steps (2 units in the last place; measured in two orders of memory under ATEN_CPU_CAPABILITY=default, avx2 and AVX512 and
# ONEDNN_MAX_CPU_ISA=AVX2 and SSE41). But rounding does decide which of two nearly equal pixels a max-pool takes and, by Adam's first steps, the
# sign of an update whose gradient is nearly 0. One of these ten runs met that at step 5: its distance grew from 2e-7 there to 2e-4 at step 23,
# 1.47 times a step. So the first four steps, whose distance is rounding alone, are held to 1e-6; later ones may grow 1.5 times a step, up
# to 1e-3.
EARLY_STEPS, EARLY, GROWTH, LATE = 4, 1e-6, 1.5, 1e-3


def assert_follows(found: Sequence[float], expected: Sequence[float], both_rounded: bool = False) -> None:
    """Losses of float32 runs of SHORT, against float64's, or against another float32 run (twice the distance)."""
    assert len(found) == len(expected)
    for step, (loss, right) in enumerate(zip(found, expected, strict=True)):
        allowed = (1 + both_rounded) * min(LATE, EARLY * GROWTH ** max(0, step + 1 - EARLY_STEPS))
        assert abs(loss / right - 1) <= allowed, f"step {step}: {loss} against {right}, allowed {allowed:.1e} of it"


def removed_from_under(folder: Path) -> None:
    """Remove a folder that others still write into: a file may come while its folder goes."""
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=True)


def wait_for(condition: Callable[[], Any], seconds: float = 40, what: str = "condition") -> Any:
    """Poll until it holds; fail with words if it does not."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    pytest.fail(f"waited {seconds} s in vain for {what}")


def faulty_net(fault: str, when: str = "self.calls > 5") -> str:
    """The source of a net that runs into `fault` in training, on rank 1. `self.calls` counts the batches that it was trained on."""
    return (
        "import os, signal, time, torch\n"
        "NAMES = ('LOCKSTEP_RANK', 'OMPI_COMM_WORLD_RANK', 'PMI_RANK', 'RANK')\n"
        "RANK = next((os.environ[name] for name in NAMES if name in os.environ), None)\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__(); self.linear = torch.nn.Linear(784, 10); self.calls = 0\n"
        "    def forward(self, x):\n"
        "        self.calls += self.training\n"
        f"        if RANK == '1' and {when}: {fault}\n"
        "        return self.linear(x.flatten(1))\n"
    )


def backward(model: nn.Module, images: Tensor) -> Tensor:
    """The scores of a model, which has its gradients then; the labels are 0, 1, 2, …"""
    import torch

    scores: Tensor = model(images)
    torch.nn.functional.cross_entropy(scores, torch.arange(len(images))).backward()
    return scores


def fill(disk: Path) -> None:
    """Leave not one block free."""
    subprocess.run(["dd", "if=/dev/zero", f"of={disk / 'filler'}", "bs=4096"], capture_output=True)


def empty_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process, and those that it starts, keep and look for in `folder` what was measured: that of the machine which runs the tests
    has no place in what they compare. But for the plotting library, which takes seconds to be put together."""
    from lockstep.report.vega import bundle

    kept = bundle.folder()
    kept.mkdir(parents=True, exist_ok=True)
    monkeypatch.delenv("LOCKSTEP_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    bundle.folder().parent.mkdir(parents=True, exist_ok=True)
    bundle.folder().symlink_to(kept)


def processes_of(folder: Path) -> list[int]:
    """Every live process whose command line names this folder: what must be gone when a run has ended."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if str(folder).encode() in words and state != "Z":
                found.append(int(entry.name))
    return found
