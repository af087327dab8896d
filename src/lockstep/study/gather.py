"""Which runs belong together: those of a study by its plan, others by what they compute and where."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from lockstep.measure.view import RunView, view
from lockstep.reading import Damaged
from lockstep.run import DAMAGED, Run, Spec
from lockstep.settings import dotted
from lockstep.study.folder import StudyFolder
from lockstep.study.plan import Cell, Planned
from lockstep.study.timing import CellTime, Raced, read

LONG = 120
"""The longest name of a cell that is made of the keys that differ."""


@dataclass
class Sample:
    """One training of a cell. `pair` says with which one of another cell it is compared: that of the same seed and repeat.

    A training of a study may have been made in another cell that computes the same: `own` says whether it was made here.
    """

    pair: Any
    run: RunView
    cell: Cell | None = None

    @property
    def spec(self) -> Spec:
        """Of the cell."""
        spec = self.run.spec()
        if self.cell is None or self.cell.plan is None:
            return spec
        recipe = msgspec.structs.replace(self.cell.recipe, seed=spec.recipe.seed)
        return msgspec.structs.replace(spec, recipe=recipe, placement=self.cell.placement, plan=self.cell.plan)

    @property
    def own(self) -> bool:
        if self.cell is None:
            return True
        spec = self.run.spec()
        return spec.part.cell == self.cell.name if spec.part else spec.placement == self.cell.placement

    @property
    def seed(self) -> int:
        return self.spec.recipe.seed

    @property
    def state(self) -> str:
        return self.run.state

    @property
    def cause(self) -> str:
        return self.run.cause

    @property
    def summary(self) -> dict[str, Any]:
        """Of a run that is done."""
        return (self.run.summary() or {}) if self.state == "done" else {}


@dataclass
class Group:
    """The runs of one cell."""

    name: str
    samples: list[Sample] = field(default_factory=list)
    planned: int = 0
    left_out: str | None = None
    cell: Cell | None = None
    """Of a study."""
    time: CellTime | None = None
    """What turns say of it, where it took turns."""
    lost: str | None = None
    """Why it fell out of the race."""
    unstarted: list[str] = field(default_factory=list)
    """Why repeats failed before there was a run folder (no network for emulated hosts, a full disk)."""

    @property
    def done(self) -> list[Sample]:
        return [each for each in self.samples if each.state == "done" and each.summary]

    @property
    def measured(self) -> bool:
        return bool(self.done or self.time)

    @property
    def spec(self) -> Spec:
        """What it is: recipe, placement and plan."""
        if self.samples or self.cell is None or self.cell.plan is None:
            return self.samples[0].spec
        return Spec(
            id=self.name,
            created=0.0,
            lockstep="",
            recipe=self.cell.recipe,
            placement=self.cell.placement,
            plan=self.cell.plan,
        )

    @property
    def cores(self) -> int:
        placement = self.spec.placement
        return placement.ranks * (placement.threads or 1)

    @property
    def failures(self) -> list[str]:
        ended = [each for each in self.samples if each.state in ("failed", "stalled", DAMAGED)]
        lost = [
            f"{each.run.id}: its summary.json is gone"
            for each in self.samples
            if each.state == "done" and not each.summary
        ]
        raced = [f"in the race: {self.lost}"] if self.lost else []
        return raced + [f"{each.run.id}: {_why(each)}" for each in ended] + lost + self.unstarted


def _why(found: Sample) -> str:
    return f"damaged: {found.cause}" if found.state == DAMAGED else found.cause


def of_study(folder: StudyFolder, planned: Planned) -> list[Group]:
    """Every cell of the study with the runs it has by now."""
    there, damage = folder.runs_of(planned.items), ""
    try:
        raced = read(folder, planned)
    except Damaged as error:
        raced, damage = None, str(error)
    groups = {cell.name: Group(cell.name, left_out=cell.left_out, cell=cell) for cell in planned.cells}
    causes = {record.get("digest"): record["cause"] for record in folder.records() if record.get("cause")}
    for name, texts in folder.damaged_of(planned.items).items():
        groups[name].unstarted += texts
    for item in planned.items:
        for cell in planned.alike(item.cell):
            group = groups[cell.name]
            group.planned += item.repeat < planned.study.repeats or item.digest in there
            if item.digest in there:
                sample = Sample((item.seed, item.repeat), view(there[item.digest]), cell)
                # How it failed is a result of the cell that it failed in.
                if sample.own or sample.state == "done":
                    group.samples.append(sample)
            elif item.digest in causes and cell.name == item.cell:
                group.unstarted.append(causes[item.digest])
    for group in groups.values():
        if damage and group.cell and group.cell.takes_turns:
            group.lost = damage
        if raced and group.cell:
            group.time, group.lost = _time(raced, group), raced.state.failures.get(group.name)
    return list(groups.values())


def _time(raced: Raced, group: Group) -> CellTime | None:
    """Early stopping and the like make a training shorter than its plan: what trainings have shown counts."""
    assert group.cell is not None
    time = raced.of(group.cell)
    shown = [float(each.summary["train_images"]) for each in group.done if each.summary.get("train_images")]
    return dataclasses.replace(time, images=statistics.median(shown)) if time and shown else time


def of_runs(runs: Sequence[Run]) -> list[Group]:
    """Runs that differ only in their seed are repeats of one cell, which is named by the keys that differ between cells."""
    found: dict[str, Group] = {}
    keys: dict[str, dict[str, Any]] = {}
    for run in {run.folder.absolute(): run for run in runs}.values():
        try:
            spec = run.spec()
        except Damaged as error:
            if len(runs) == 1:
                raise
            found[run.id] = Group(run.id, planned=1, unstarted=[str(error)])
            continue
        content = dotted(*spec.known())
        seed = content.pop("seed", spec.recipe.seed)
        name = json.dumps(content, sort_keys=True)
        keys[name] = content
        group = found.setdefault(name, Group(name))
        earlier = sum(each.seed == seed for each in group.samples)
        group.samples.append(Sample((seed, earlier), view(run)))
        group.planned += 1
    labels = _labels(keys)
    if any(len(label) > LONG for label in labels.values()):
        labels = _called([found[name] for name in labels])
    for name, label in labels.items():
        found[name].name = label
    return list(found.values())


def _called(groups: Sequence[Group]) -> dict[str, str]:
    """By the tag of its first run where no other group has it, else by that run's id: what differs between very different runs is no name."""
    firsts = {group.name: group.samples[0].run for group in groups}
    tags = Counter(first.tags[0] for first in firsts.values() if first.tags)
    found = {}
    for group in groups:
        first, more = firsts[group.name], len(group.samples) - 1
        name = first.tags[0] if first.tags and tags[first.tags[0]] == 1 else first.id
        found[group.name] = f"{name} and {more} more" if more else name
    return found


def _labels(keys: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Names such as ranks=1 and ranks=2: only the keys that differ between the cells. An attached command names its script, which is its model."""
    every = sorted({key for content in keys.values() for key in content})
    differing = [key for key in every if len({json.dumps(content.get(key)) for content in keys.values()}) > 1]
    return {
        name: ", ".join(
            f"{key}={content.get(key)}" for key in differing if not (key == "model" and "command" in content)
        )
        or "all runs"
        for name, content in keys.items()
    }
