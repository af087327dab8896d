"""From a study to its runs: every cell checked on this machine, every repeat given an identity, all in a fair order.

A run is known by a hash of all that it computes and where, so what the study has run once is not run again until that changes. Runs of other
studies are never taken over: they were made at another time, and times are compared within minutes.
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
    """In the order they are run."""

    def __post_init__(self) -> None:
        missing = {item.cell for item in self.items} - {cell.name for cell in self.cells}
        if missing:
            raise ValueError(f"runs of a cell '{min(missing)}' that is not there")

    def cell(self, name: str) -> Cell:
        return next(cell for cell in self.cells if cell.name == name)


def plan(study: Study, options: Options | None = None, runs: Path | None = None) -> Planned:
    """Check every cell, and put all runs in their order. A cell that cannot run here is left out, and says why."""
    cells = [_cell(study, name, options, runs) for name in study.all_cells()]
    able = [cell for cell in cells if cell.left_out is None]
    if not able:
        raise InputError(f"study '{study.name}': no cell can run here; '{cells[0].name}': {cells[0].left_out}")
    items = []
    for repeat in range(study.repeats):
        block = _block(study, able, repeat)
        # The order within a block is drawn, so no cell always comes first; drawn from the names, so a resumed study has it again.
        random.Random(f"{study.name} {repeat}").shuffle(block)
        items += block
    return Planned(study=study, cells=cells, items=items)


def _cell(study: Study, name: str, options: Options | None, runs: Path | None) -> Cell:
    from lockstep.launch import specify  # half a second of imports, which reading a study does without

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
    own = [_file_hash(name) for name in (recipe.model, recipe.data, cell.placement.strategy)]
    return json.dumps(msgspec.to_builtins([recipe, cell.placement, cell.plan, own]), sort_keys=True)


def _file_hash(name: str) -> str:
    """Of a user's own file: when it changes, the recipe has changed."""
    where, colon, _ = name.rpartition(":")
    path = Path(where)
    return hashlib.sha256(path.read_bytes()).hexdigest() if colon and where.endswith(".py") and path.is_file() else ""


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
    """The run and its spec, worked out anew; it must still be what was planned, or its identity would be a lie.

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
    """Sorts by time as every run's name does, and ends with the identity."""
    plain = "".join(c if c.isalnum() else "-" for c in f"{planned.study.name}-{item.cell}").lower()
    while "--" in plain:
        plain = plain.replace("--", "-")
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{plain[:48].strip('-')}-{item.digest}"


def outcome(run: Run | None, again: bool = False) -> str:
    """done, failed (a result too), busy, or to do: nothing there yet, or it was stopped or killed on its way."""
    if run is None:
        return "to do"
    # How it ended is what its folder says: that one is silent, or its watcher gone, is a judgement of this moment.
    recorded, now = run.recorded_status()["state"], run.status()["state"]
    if now == DAMAGED:
        return "to do"
    if recorded == "done":
        return "done"
    if recorded in ("failed", "stalled"):
        return "to do" if again else "failed"
    return "busy" if now in ("starting", "running") else "to do"
