"""Which runs belong together: those of a study by its plan, others by what they compute and where."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from lockstep import index
from lockstep.reading import Damaged, is_file
from lockstep.run import DAMAGED, Run
from lockstep.study.blocks import sittings
from lockstep.study.file import flatten
from lockstep.study.folder import StudyFolder
from lockstep.study.measures import Sample, sample
from lockstep.study.plan import Planned


@dataclass
class Group:
    """The runs of one cell."""

    name: str
    samples: list[Sample] = field(default_factory=list)
    planned: int = 0
    left_out: str | None = None
    unstarted: list[str] = field(default_factory=list)
    """Why repeats came to nothing before there was a run folder (no network for emulated hosts, a full disk)."""

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


def named(names: Sequence[str], root: Path) -> list[Run]:
    """Runs as `Run.find` finds them; where there are thousands, their folders are listed once for all names."""
    ids: list[str] | None = None
    found = []
    for name in names:
        if is_file(Path(name) / "run.json"):
            found.append(Run(Path(name)))
            continue
        ids = [row["id"] for row in index.rows(root)] if ids is None else ids
        matches = [name] if name in ids else [each for each in ids if each.startswith(name) and name != "last"]
        # 'last', none and several: the same answers and errors as everywhere.
        found.append(Run(root / matches[0]) if len(matches) == 1 else Run.find(name, root))
    return found


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
            groups[item.cell].samples.append(sample(there[item.digest], blocks[item.digest]))
        elif item.digest in causes:
            groups[item.cell].unstarted.append(causes[item.digest])
    return list(groups.values())


def of_runs(runs: Sequence[Run]) -> list[Group]:
    """Runs that compute the same in the same place, seed apart, are repeats of one cell; named by what tells it from the others."""
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
        content = flatten(msgspec.to_builtins({"recipe": spec.recipe, "placement": spec.placement}))
        seed = content.pop("seed")
        name = json.dumps(content, sort_keys=True)
        keys[name] = content
        group = found.setdefault(name, Group(name))
        earlier = sum(each.seed == seed for each in group.samples)
        group.samples.append(sample(run, (seed, earlier)))
        group.planned += 1
    labels = _labels(keys)
    for name, label in labels.items():
        found[name].name = label
    return list(found.values())


def _labels(keys: dict[str, dict[str, Any]]) -> dict[str, str]:
    """ranks=1 and ranks=2: the keys that differ between the cells, and no others."""
    every = sorted({key for content in keys.values() for key in content})
    differing = [key for key in every if len({json.dumps(content.get(key)) for content in keys.values()}) > 1]
    return {
        name: ", ".join(f"{key}={content.get(key)}" for key in differing) or "all runs"
        for name, content in keys.items()
    }
