"""From a study to its runs: every cell checked on this machine, every repeat given an identity, all in a fair order.

A run is identified by a hash of its recipe and placement, so a finished run is not repeated until one of these changes. Runs of other
studies are never reused: they were made at another time, and times are compared within minutes.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from lockstep.errors import InputError
from lockstep.placement import Placement, Plan, one_command_per_host
from lockstep.plugins import source_digest
from lockstep.recipe import Recipe
from lockstep.run import DAMAGED, Options, Part, Run, Spec
from lockstep.study.definition import Study

DIGEST = 12


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One cell as it is on this machine, with the first repeat's seed; or why it cannot be run here."""

    name: str
    recipe: Recipe
    placement: Placement
    plan: Plan | None = None
    left_out: str | None = None


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One repeat of one cell."""

    cell: str
    repeat: int
    seed: int
    digest: str


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """A study on this machine: what study.json holds."""

    study: Study
    cells: list[Cell]
    items: list[Item]
    """In the order in which they run."""

    def __post_init__(self) -> None:
        missing = {item.cell for item in self.items} - {cell.name for cell in self.cells}
        if missing:
            raise ValueError(f"runs of a cell '{min(missing)}' that is not there")

    def cell(self, name: str) -> Cell:
        return next(cell for cell in self.cells if cell.name == name)


def plan(study: Study, options: Options | None = None, runs: Path | None = None) -> Planned:
    """Check every cell, and order all runs. A cell that cannot run here is left out, with the reason."""
    cells = [_cell(study, name, options, runs) for name in study.all_cells()]
    able = [cell for cell in cells if cell.left_out is None]
    if not able:
        raise InputError(f"study '{study.name}': no cell can run here; '{cells[0].name}': {cells[0].left_out}")
    items = []
    for repeat in range(study.repeats):
        block = _block(study, able, repeat)
        # The order within a block is random, so no cell always comes first; seeded by the names, so a resumed study has the same order.
        random.Random(f"{study.name} {repeat}").shuffle(block)
        items += block
    return Planned(study=study, cells=cells, items=items)


def _cell(study: Study, name: str, options: Options | None, runs: Path | None) -> Cell:
    from lockstep.launch import specify  # half a second of imports that reading a study does not need

    recipe, placement = study.settings(name, study.seed_of(name, 0))
    try:
        _, spec = specify(recipe, placement, options, runs)
    except InputError as error:
        return Cell(name=name, recipe=recipe, placement=placement, left_out=str(error))
    if one_command_per_host(spec.placement):
        reason = f"hosts={placement.hosts} need a command on each host: use launcher=slurm or hosts=emulated:{placement.hosts}"
        return Cell(name=name, recipe=recipe, placement=placement, left_out=reason)
    return Cell(name=name, recipe=spec.recipe, placement=spec.placement, plan=spec.plan)


def _block(study: Study, cells: list[Cell], repeat: int) -> list[Item]:
    """One run of every cell, with one seed. Cells that compute the same in the same place are told apart by their order."""
    seen: dict[str, int] = {}
    block = []
    for cell in cells:
        seed = study.seed_of(cell.name, repeat)
        content = _content(cell, seed)
        again = seen[content] = seen.get(content, 0) + 1
        digest = hashlib.sha256(f"{content} repeat {repeat} again {again}".encode()).hexdigest()[:DIGEST]
        block.append(Item(cell=cell.name, repeat=repeat, seed=seed, digest=digest))
    return block


def _content(cell: Cell, seed: int) -> str:
    recipe = msgspec.structs.replace(cell.recipe, seed=seed)
    # When a user's own file changes, the recipe has changed.
    own = [source_digest(name) or "" for name in (recipe.model, recipe.data, cell.placement.strategy)]
    return json.dumps(msgspec.to_builtins([recipe, cell.placement, cell.plan, own]), sort_keys=True)


class PlanChanged(InputError):
    """A run is no longer what the study planned."""


def prepared(
    planned: Planned,
    item: Item,
    options: Options | None,
    runs: Path | None,
    part: Part | None = None,
    known: Callable[[str], None] | None = None,
) -> tuple[Run, Spec]:
    """The run and its spec, resolved again; it must still be what was planned, or its identity would be wrong.

    `known` is told the run's name before its folder becomes a run, so that no kill leaves one that its study does not know.
    """
    from lockstep.launch import prepare

    recipe, placement = planned.study.settings(item.cell, item.seed)
    cell = planned.cell(item.cell)

    def check(spec: Spec) -> None:
        now = (msgspec.structs.replace(spec.recipe, seed=cell.recipe.seed), spec.placement)
        if now != (cell.recipe, cell.placement):
            raise PlanChanged(
                f"study '{planned.study.name}', cell '{item.cell}': what it comes to on this machine has changed since the study "
                "was planned (a recipe file, or what 'lockstep comms' measured): run the study again"
            )
        if known:
            known(spec.id)

    return prepare(recipe, placement, options, runs, run_name(planned, item), check=check, part=part)


def run_name(planned: Planned, item: Item) -> str:
    """The run's name: it starts with the time, as every run's name does, and ends with the identity."""
    name = plain(f"{planned.study.name}-{item.cell}")[:48].strip("-")
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{name}-{item.digest}"


def plain(name: str) -> str:
    """A name as it stands in the names of runs: letters and digits, with single hyphens between them."""
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def outcome(run: Run | None, again: bool = False) -> str:
    """done, failed (a result too), busy, or to do: nothing there yet, or it was stopped or killed on its way."""
    if run is None:
        return "to do"
    # Only the recorded end counts: that a rank is silent, or the supervisor gone, is inferred at this moment.
    recorded, now = run.recorded_status()["state"], run.status()["state"]
    if now == DAMAGED:
        return "to do"
    if recorded == "done":
        return "done"
    if recorded in ("failed", "stalled"):
        return "to do" if again else "failed"
    return "busy" if now in ("starting", "running") else "to do"
