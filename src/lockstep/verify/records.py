"""What the witnesses of one run wrote down (training/witness.py has the files)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from lockstep.measure.records import mean_losses, read_steps
from lockstep.run import Run, read_lines
from lockstep.verify.checks import Array

# Files of the one process are read once for each placement; small ones stay in memory.
SMALL_BYTES = 1 << 20


class Records:
    """What the witnesses of one run wrote down."""

    def __init__(self, run: Run) -> None:
        self.run, self.spec = run, run.spec()
        self.folder = run.folder / "proof"
        self.rows: list[dict[int, dict[str, Any]]] = []
        self.evaluations: list[dict[int, dict[str, Any]]] = []
        self.has_batch_norm = False
        self._small: dict[Path, dict[str, Any]] = {}
        for rank in range(self.spec.plan.ranks):
            lines = list(read_lines(self.folder / f"rank-{rank:04d}.jsonl"))
            self.rows.append({row["step"]: row for row in lines if "step" in row})
            self.evaluations.append({row["epoch"]: _numbers(row) for row in lines if "epoch" in row})
            self.has_batch_norm |= any(row.get("batch_norm", False) for row in lines)

    def load(self, kind: str, number: int, rank: int | None = None) -> dict[str, Any] | None:
        import torch

        path = self.folder / f"{kind}-{number:08d}{'' if rank is None else f'-{rank:04d}'}.pt"
        if path in self._small:
            return self._small[path]
        content: dict[str, Any] | None = (
            torch.load(path, map_location="cpu", weights_only=True) if path.exists() else None
        )
        if content is not None and path.stat().st_size < SMALL_BYTES:
            self._small[path] = content
        return content

    @property
    def judged(self) -> list[int]:
        return sorted(int(path.stem.partition("-")[2]) for path in self.folder.glob("step-*.pt"))


def _numbers(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: it was written as null."""
    return {key: math.nan if value is None else value for key, value in row.items()}


def step_losses(run: Run) -> Array:
    """The mean loss of a sample at every step, over all ranks."""
    rows = [read_steps(run.rank_folder(rank) / "steps.bin") for rank in range(run.spec().plan.ranks)]
    return mean_losses(rows)
