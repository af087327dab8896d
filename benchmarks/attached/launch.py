"""How the scripts are launched: in one process, or as ranks of torchrun."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import environment, ours
from benchmarks.suspects.execute import run

HERE = Path(__file__).parent / "scripts"
SCRIPTS = {
    "plain": "plain.py",
    "attention": "attention.py",
    "Lightning": "with_lightning.py",
    "Accelerate": "with_accelerate.py",
    "Trainer": "with_trainer.py",
}
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
STEPS = 120


def command(kind: str, ranks: int, steps: int = STEPS, passes: int = 1) -> list[str]:
    python = str(environment.peers_python())
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return [python, *torchrun, str(HERE / SCRIPTS[kind]), str(steps), str(passes)]


class Attached:
    """One run of `lockstep attach`, in a folder that goes with it."""

    def __init__(self, kind: str, ranks: int, passes: int = 1) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="lockstep-bench-")
        self._at = ["--runs", self._folder.name]
        run(
            [ours.executable(), "attach", *self._at, "--name", "seen", "--", *command(kind, ranks, passes=passes)],
            THREADS,
        )

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    @property
    def step_ms(self) -> float:
        """The mean over ranks of a step after warm-up."""
        phases = json.loads(run([ours.executable(), "show", "seen", *self._at, "--json"]))["phases"]
        return float(phases["mean_ns"]["total"]) / 1e6

    @property
    def cost(self) -> dict[str, float]:
        """What the hooks say that they take of a step, and the step, in seconds."""
        summary = json.loads(run([ours.executable(), "show", "seen", *self._at, "--json"]))
        return {
            "seconds": summary["hook_seconds"] / summary["steps"],
            "step": summary["train_seconds"] / summary["steps"],
        }

    def predicted(self, ranks: int, *words: str) -> dict[str, Any]:
        told = run([ours.executable(), "predict", "seen", *words, "--ranks", str(ranks), *self._at, "--json"])
        row: dict[str, Any] = next(row for row in json.loads(told)["rows"] if row["ranks"] == ranks)
        return row
