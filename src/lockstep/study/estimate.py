"""How long a study will take: from its own runs, else from earlier runs of the same model, else a guess that is marked as one."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep import index
from lockstep.run import runs_root
from lockstep.study.plan import Cell, Item, Planned
from lockstep.units import counted

# Images per second of one core, if nothing was measured: 2 cores of an AMD EPYC (Zen 3) virtual machine, rounded down.
GUESS = {"mnist-convnet": 10_000.0, "tied-conv": 500.0, "cifar-vgg": 100.0}
GUESS_OTHER = 300.0
# From the command to the first step and back: interpreter, torch, data, process group.
START_S = 5.0
RECENT = 20


@dataclass(frozen=True)
class Estimate:
    """Seconds of one run of a cell, and the basis of the estimate."""

    seconds: float
    basis: str


def of_cells(
    planned: Planned, records: Sequence[dict[str, Any]], runs: Path | None, costs: Mapping[str, float] | None = None
) -> dict[str, Estimate]:
    """For every cell that can run here. `costs`: seconds for an image, of cells that have raced."""
    walls: dict[str, list[float]] = {}
    digests = {item.digest: item.cell for item in planned.items}
    for record in records:
        whole = record.get("state") == "done" and not record.get("resumed")
        if whole and record.get("digest") in digests:
            for cell in planned.alike(digests[record["digest"]]):
                walls.setdefault(cell.name, []).append(record["ended"] - record["began"])
    rows = [row for row in index.rows(runs_root(runs)) if row["state"] == "done" and row.get("images_per_second")]
    return {
        cell.name: Estimate(statistics.median(walls[cell.name]), "its own runs")
        if cell.name in walls
        else Estimate(START_S + _images(cell) * costs[cell.name], "its steps in turns")
        if costs and cell.name in costs
        else _other(cell, rows)
        for cell in planned.cells
        if cell.plan is not None
    }


def _other(cell: Cell, rows: Sequence[dict[str, Any]]) -> Estimate:
    assert cell.plan is not None
    held = cell.placement.ranks * (cell.placement.threads or 1)
    alike = [row for row in rows if row["model"] == cell.recipe.model and row.get("threads")][-RECENT:]
    if alike:
        per_core = statistics.median(row["images_per_second"] / (row["ranks"] * row["threads"]) for row in alike)
        basis = f"{counted(len(alike), 'earlier run')} of {cell.recipe.model}"
    else:
        per_core, basis = GUESS.get(cell.recipe.model, GUESS_OTHER), "a guess"
    return Estimate(START_S + _images(cell) / (per_core * held), basis)


def _images(cell: Cell) -> float:
    """Testing is a forward pass: about a third of a training step."""
    plan = cell.plan
    assert plan is not None
    share = plan.total_steps / max(1, plan.steps_per_epoch)
    return share * (plan.train_samples + plan.test_samples / 3)


def left(items: Sequence[Item], cells: dict[str, Estimate]) -> float:
    """Seconds of all these runs, one after the other."""
    return sum(cells[item.cell].seconds for item in items)
