"""The probe: one start of a placement's ranks measures several ways to take a step in turns (training/probe.py).

So a machine that changes its speed changes it for all of them alike. Why N ranks are not N times faster (explain/), and what more of
them would give (predict/), follow from differences between the ways.
"""

from __future__ import annotations

from pathlib import Path

from lockstep.errors import InputError
from lockstep.launch import execute, prepare
from lockstep.launch.supervise import Progress
from lockstep.placement import Placement
from lockstep.recipe import Recipe
from lockstep.run import Options, Probe
from lockstep.ways import Way, read


def measure(
    recipe: Recipe,
    placement: Placement,
    folder: Path,
    probe: Probe,
    data_root: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Way]:
    """Start the placement's ranks once and measure; `folder` becomes a run folder of its own."""
    if recipe.quantize != "off":
        raise InputError(
            "a step with quantize=qat cannot be taken apart yet: measure the same recipe with quantize=off"
        )
    options = Options(data_root=data_root, save_model=False, probe=probe)
    run, spec = prepare(recipe, placement, options, folder.parent, folder.name)
    execute(run, spec, progress=progress)
    return read(folder)
