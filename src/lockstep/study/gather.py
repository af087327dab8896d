"""Which runs belong together: those of a study by its plan, others by what they compute and where."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.measure.view import RunView, view
from lockstep.reading import Damaged
from lockstep.run import DAMAGED, Run, Spec
from lockstep.settings import dotted
from lockstep.study.blocks import sittings
from lockstep.study.folder import StudyFolder
from lockstep.study.plan import Planned


@dataclass
class Sample:
    """One run of a cell. `pair` says with which run of another cell it is compared: the one of the same block."""

    pair: Any
    run: RunView

    @property
    def spec(self) -> Spec:
        return self.run.spec()

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
    unstarted: list[str] = field(default_factory=list)
    """Why repeats failed before there was a run folder (no network for emulated hosts, a full disk)."""

    @property
    def done(self) -> list[Sample]:
        return [each for each in self.samples if each.state == "done" and each.summary]

    @property
    def failures(self) -> list[str]:
        ended = [each for each in self.samples if each.state in ("failed", "stalled", DAMAGED)]
        lost = [
            f"{each.run.id}: its summary.json is gone"
            for each in self.samples
            if each.state == "done" and not each.summary
        ]
        return [f"{each.run.id}: {_why(each)}" for each in ended] + lost + self.unstarted


def _why(found: Sample) -> str:
    return f"damaged: {found.cause}" if found.state == DAMAGED else found.cause


def of_study(folder: StudyFolder, planned: Planned) -> list[Group]:
    """Every cell of the study with the runs it has by now."""
    there = folder.runs_of(planned.items)
    blocks = sittings(planned, there)
    groups = {cell.name: Group(cell.name, left_out=cell.left_out) for cell in planned.cells}
    causes = {record.get("digest"): record["cause"] for record in folder.records() if record.get("cause")}
    for cell, texts in folder.damaged_of(planned.items).items():
        groups[cell].unstarted += texts
    for item in planned.items:
        groups[item.cell].planned += 1
        if item.digest in there:
            groups[item.cell].samples.append(Sample(blocks[item.digest], view(there[item.digest])))
        elif item.digest in causes:
            groups[item.cell].unstarted.append(causes[item.digest])
    return list(groups.values())


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
        content = dotted(spec.recipe, spec.placement)
        seed = content.pop("seed")
        name = json.dumps(content, sort_keys=True)
        keys[name] = content
        group = found.setdefault(name, Group(name))
        earlier = sum(each.seed == seed for each in group.samples)
        group.samples.append(Sample((seed, earlier), view(run)))
        group.planned += 1
    labels = _labels(keys)
    for name, label in labels.items():
        found[name].name = label
    return list(found.values())


def _labels(keys: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Names such as ranks=1 and ranks=2: only the keys that differ between the cells."""
    every = sorted({key for content in keys.values() for key in content})
    differing = [key for key in every if len({json.dumps(content.get(key)) for content in keys.values()}) > 1]
    return {
        name: ", ".join(f"{key}={content.get(key)}" for key in differing) or "all runs"
        for name, content in keys.items()
    }
