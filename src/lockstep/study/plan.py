"""From a study to its runs: every cell checked on this machine, every training given an identity.

Accuracy belongs to the recipe: cells that compute the same share their trainings, wherever these are made. Time belongs to the placement, and
comes from turns (timing.py). A training is identified by a hash of what it computes and its seed, so a finished one is not repeated until
that changes. Slurm's ranks can take turns within one allocation. As jobs of their own they cannot: then each of its cells has trainings of its
own, which give its times too.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import msgspec

from lockstep.errors import InputError
from lockstep.metrics import metric_of
from lockstep.placement import Fsdp, Placement, Ray, changes_mathematics, one_command_per_host, unknown_mathematics
from lockstep.plan import Plan
from lockstep.plugins import source_digest
from lockstep.reading import exists
from lockstep.recipe import Recipe, global_terms
from lockstep.run import DAMAGED, Options, Part, Run, Spec, runs_root
from lockstep.study.definition import Study
from lockstep.task import own_functions

DIGEST = 12
LOOKS = (1, 2, 4)
"""After how many times `repeats` seeds accuracies are compared; what is told apart by then is not trained with more."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One cell as it is on this machine, with the first repeat's seed; or why it cannot be run here."""

    name: str
    recipe: Recipe
    placement: Placement
    plan: Plan | None = None
    left_out: str | None = None
    mathematics: str = ""
    """A hash of what it computes: cells that have the same one learn the same."""
    within: bool = False
    """Whether the study ran within an allocation of Slurm's, where its ranks can take turns."""
    unproven: str | None = None
    """What `verify` found that it does not compute as one process would."""

    @property
    def job(self) -> bool:
        """Whether each of its trainings is a job of Slurm's own."""
        return self.placement.launcher == "slurm" and not self.within

    @property
    def takes_turns(self) -> bool:
        return self.left_out is None and not self.job

    @property
    def cores(self) -> int:
        return self.placement.ranks * (self.placement.threads or 1)


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One training."""

    cell: str
    """The first cell that computes this."""
    repeat: int
    seed: int
    digest: str


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """A study on this machine: what study.json holds."""

    study: Study
    cells: list[Cell]
    items: list[Item]
    """As many as could be needed, in the order in which they are made."""

    def __post_init__(self) -> None:
        missing = {item.cell for item in self.items} - {cell.name for cell in self.cells}
        if missing:
            raise ValueError(f"runs of a cell '{min(missing)}' that is not there")

    def cell(self, name: str) -> Cell:
        return next(cell for cell in self.cells if cell.name == name)

    def alike(self, name: str) -> list[Cell]:
        """The cells that compute the same as this one, itself among them."""
        own = self.cell(name)
        return [cell for cell in self.cells if cell is own or own.mathematics == cell.mathematics != ""]

    def expected(self, started: Container[str]) -> list[Item]:
        """The trainings up to the first look, and those beyond it that were started."""
        return [item for item in self.items if item.repeat < self.study.repeats or item.digest in started]

    @property
    def baseline(self) -> str:
        return self.study.baseline or self.cells[0].name


def plan(study: Study, options: Options | None = None, runs: Path | None = None) -> Planned:
    """Check every cell, and list all trainings. A cell that cannot run here is left out, with the reason."""
    cells = [_cell(study, name, options, runs) for name in study.all_cells()]
    able = [cell for cell in cells if cell.left_out is None]
    if not able:
        raise InputError(f"study '{study.name}': no cell can run here; '{cells[0].name}': {cells[0].left_out}")
    return Planned(study=study, cells=cells, items=_items(study, able))


def apart(planned: Planned, name: str, reason: str) -> Planned:
    """The same, but this cell does not compute what its recipe says, and so has trainings of its own."""
    own = _digest(f"{planned.cell(name).mathematics} {name}")
    changed = msgspec.structs.replace(planned.cell(name), mathematics=own, unproven=reason)
    cells = [changed if cell.name == name else cell for cell in planned.cells]
    items = _items(planned.study, [cell for cell in cells if cell.left_out is None])
    return msgspec.structs.replace(planned, cells=cells, items=items)


def _items(study: Study, able: list[Cell]) -> list[Item]:
    recipes = list({cell.mathematics: cell for cell in reversed(able)}.values())[::-1]
    races = len(able) > 1 and all(cell.takes_turns for cell in able)
    return [_item(study, cell, repeat) for repeat in range(_most_repeats(study, recipes, races)) for cell in recipes]


def wanted_metrics(study: Study) -> list[str]:
    """Every metric that it shows or that a claim is about."""
    return [*study.metrics, *(claim.metric for published in study.published for claim in published.claims)]


def _most_repeats(study: Study, recipes: list[Cell], races: bool) -> int:
    """Where nothing but time is asked for, one training shows whether it takes as long as its steps say."""
    learned = any(not metric_of(metric).of_placement for metric in wanted_metrics(study))
    if not learned and races:
        return 1
    most = study.repeats * (LOOKS[-1] if learned and len(recipes) > 1 else 1)
    # A seed that comes again would give the same accuracy again.
    return min(most, max(study.repeats, len(study.seeds))) if study.seeds else most


def _cell(study: Study, name: str, options: Options | None, runs: Path | None) -> Cell:
    from lockstep.launch import specify  # half a second of imports that reading a study does not need
    from lockstep.launch.slurm.launcher import allocation

    recipe, placement = study.settings(name, study.seed_of(name, 0))
    try:
        _, spec = specify(recipe, placement, options, runs)
    except InputError as error:
        return Cell(name=name, recipe=recipe, placement=placement, left_out=str(error))
    if one_command_per_host(spec.placement):
        reason = f"hosts={placement.hosts} need a command on each host: use launcher=slurm or hosts=emulated:{placement.hosts}"
        return Cell(name=name, recipe=recipe, placement=placement, left_out=reason)
    within = spec.placement.launcher == "slurm" and allocation() is not None
    cell = Cell(name=name, recipe=spec.recipe, placement=spec.placement, plan=spec.plan, within=within)
    return msgspec.structs.replace(cell, mathematics=_digest(_mathematics(cell)))


def _mathematics(cell: Cell) -> str:
    """What is computed, whatever the seed: the recipe in global terms, and of the placement only what changes the result."""
    assert cell.plan is not None
    recipe = msgspec.structs.replace(global_terms(cell.recipe), seed=0, lr_rule="keep", lr_batch=None)
    placement = cell.placement
    matters = changes_mathematics(placement, recipe) or unknown_mathematics(placement) or cell.job
    own = [
        source_digest(name) or "" for name in (recipe.model, recipe.data, placement.strategy, *own_functions(recipe))
    ]
    content = [
        _as_before(msgspec.to_builtins(recipe)),
        cell.plan.lr,
        cell.plan.train_samples,
        cell.plan.test_samples,
        _placed_as_before(msgspec.to_builtins(placement)) if matters else None,
        own,
    ]
    alone = cell.name if cell.job else ""
    return json.dumps([*msgspec.to_builtins(content), alone], sort_keys=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST]


def _item(study: Study, cell: Cell, repeat: int) -> Item:
    seed = study.seed_of(cell.name, repeat)
    digest = _digest(f"{cell.mathematics} seed {seed} repeat {repeat}")
    return Item(cell=cell.name, repeat=repeat, seed=seed, digest=digest)


# Fields that came after the packs of version 0.1: what raced or trained without them is the same, so they count only where they are set.
NEWER = (("placement", "shares"), ("plan", "shares"))
NEWER_IN_RECIPE = ("loss", "metrics")


def _as_before(recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe without the newer fields that say what was always so."""
    return {
        key: value for key, value in recipe.items() if key not in NEWER_IN_RECIPE or value != getattr(Recipe(), key)
    }


def _placed_as_before(placement: dict[str, Any]) -> dict[str, Any]:
    """A placement as it was written before FSDP had groups, DDP its auto, and Ray was there: what ran then had all its parameters used."""
    ddp = placement["ddp"]
    found = {**placement, "ddp": {**ddp, "find_unused_parameters": ddp["find_unused_parameters"] is True}}
    for key, usual in (("fsdp", Fsdp()), ("ray", Ray())):
        if found[key] == msgspec.to_builtins(usual):
            del found[key]
    # How a job gives way changes nothing that is measured of it.
    found["slurm"] = {key: value for key, value in found["slurm"].items() if key not in ("requeue", "grace")}
    return found


def timed_content(planned: Planned) -> tuple[str, str]:
    """Hashes of all that races, its cells and the user's own files: when one of them changes, all race again."""
    cells = [msgspec.structs.replace(cell, mathematics="", unproven=None) for cell in planned.cells if cell.takes_turns]
    names = [(c.recipe.model, c.recipe.data, c.placement.strategy, *own_functions(c.recipe)) for c in cells]
    own = [source_digest(name) or "" for of_cell in names for name in of_cell]
    content = msgspec.to_builtins(cells)
    for cell in content:
        del cell["within"]  # packs of version 0.1 do not have it
        cell["recipe"] = _as_before(cell["recipe"])
        for part, key in NEWER:
            if cell[part] and not cell[part][key]:
                del cell[part][key]
        cell["placement"] = _placed_as_before(cell["placement"])
    return _digest(json.dumps(content, sort_keys=True)), _digest(" ".join(own))


class PlanChanged(InputError):
    """A run is no longer what the study planned."""


def prepared(
    planned: Planned,
    item: Item,
    place: str,
    options: Options | None,
    runs: Path | None,
    part: Part | None = None,
    known: Callable[[str], None] | None = None,
) -> tuple[Run, Spec]:
    """The run and its spec, in the cell `place`, resolved again; it must still be what was planned, or its identity would be wrong.

    `known` is told the run's name before its folder becomes a run, so that no kill leaves one that its study does not know.
    """
    from lockstep.launch import prepare

    recipe, placement = planned.study.settings(place, item.seed)
    cell = planned.cell(place)

    def check(spec: Spec) -> None:
        now = (msgspec.structs.replace(spec.recipe, seed=cell.recipe.seed), spec.placement)
        if now != (cell.recipe, cell.placement):
            raise PlanChanged(
                f"study '{planned.study.name}', cell '{place}': what it comes to on this machine has changed since the study "
                "was planned (a recipe file, or what 'lockstep comms' measured): run the study again"
            )
        if known:
            known(spec.id)

    return prepare(
        recipe, placement, options, runs, run_name(planned, item, place, runs_root(runs)), check=check, part=part
    )


def run_name(planned: Planned, item: Item, place: str, runs: Path) -> str:
    """The run's name: it starts with the time, as every run's name does, and ends with the identity."""
    name = plain(f"{planned.study.name}-{place}")[:48].strip("-")
    first = f"{time.strftime('%Y%m%d-%H%M%S')}-{name}-{item.digest}"
    # It may have been begun and have ended within this second.
    names = itertools.chain([first], (f"{first}-{number}" for number in itertools.count(2)))
    return next(name for name in names if not exists(runs / name))


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
