"""What a report is about: one run, some runs, or a study, each read once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lockstep.errors import InputError
from lockstep.explain.evidence import same_task
from lockstep.measure.view import RunView
from lockstep.metrics import USUAL, fitting
from lockstep.reading import is_dir, is_file
from lockstep.run import Run, runs_root
from lockstep.study import compare, gather
from lockstep.study.folder import StudyFolder
from lockstep.study.gather import Group
from lockstep.units import counted

COLOURS = 8


class Colour(NamedTuple):
    name: str
    again: bool


@dataclass(frozen=True)
class Subject:
    """Cells with their runs, and the comparison of them."""

    name: str
    kind: Literal["run", "runs", "study"]
    groups: list[Group]
    comparison: dict[str, Any]
    study: StudyFolder | None = None

    @cached_property
    def runs(self) -> list[RunView]:
        found = {each.run.id: each.run for group in self.groups for each in group.samples}
        return list(found.values())

    @cached_property
    def done(self) -> list[Group]:
        """Cells that were measured: in a race, or by a finished run."""
        return [group for group in self.groups if group.measured]

    @cached_property
    def begun(self) -> list[Group]:
        """Cells that have any run."""
        return [group for group in self.groups if group.samples]

    @cached_property
    def trained(self) -> list[Group]:
        """Cells that have any run, one for each set of runs: cells that compute the same share theirs."""
        found: dict[tuple[str, ...], Group] = {}
        for group in sorted(self.begun, key=lambda group: not group.samples[0].own):
            found.setdefault(tuple(each.run.id for each in group.samples), group)
        return sorted(found.values(), key=self.place)

    def sharing(self, group: Group) -> list[str]:
        """The cells that have the same runs, itself among them."""
        own = [each.run.id for each in group.samples]
        return [other.name for other in self.begun if [each.run.id for each in other.samples] == own]

    def place(self, group: Group) -> int:
        return self.groups.index(group)

    def colour(self, group: Group) -> Colour:
        """The colour of a cell in every plot; from the ninth on they come again, dashed."""
        again, number = divmod(self.place(group), COLOURS)
        return Colour(f"c{number}", again % 2 == 1)

    @cached_property
    def peers(self) -> list[RunView]:
        """Finished runs that its runs are explained beside: its own, and for a single run those of the same task next to it in time."""
        own = list({each.run.id: each.run for group in self.done for each in group.done}.values())
        return own if self.kind != "run" or not own else [*own, *same_task(own[0])]


def of_names(names: Sequence[str], runs: Path | None) -> list[Subject]:
    """One subject for each study that is named, and one for all the runs together."""
    studies = {
        name: StudyFolder.find(name, runs) for name in names if name != "last"
    }  # 'last' is the last run, as with show
    found = [of_study(study) for study in studies.values() if study]
    others = [name for name in names if not studies.get(name) and may_be_a_run(name)]
    if others:
        found.append(of_runs([run for name in others for run in Run.find_all(name, runs_root(runs))]))
    if not found:
        raise InputError(f"{names[0]}: neither a run nor a study; 'lockstep runs' and 'lockstep study list' list them")
    return found


def of_study(folder: StudyFolder) -> Subject:
    groups = gather.of_study(folder, folder.read())
    return Subject(folder.name, "study", groups, compare.study_document(folder), folder)


def of_runs(runs: Sequence[Run], baseline: str | None = None, compared: bool = False) -> Subject:
    """`compared`: also a run alone is a cell of a comparison."""
    groups = gather.of_runs(runs)
    if len(runs) == 1 and not compared:
        groups[0].name = runs[0].id
        # A target of one run alone says nothing, and a loop of the user's own may have no accuracy to take it from.
        return Subject(
            runs[0].id,
            "run",
            groups,
            compare.table(
                groups, None, fitting(USUAL, [group.spec.recipe for group in groups if group.samples]), target=0.0
            ),
        )
    return Subject(counted(len(runs), "run"), "runs", groups, compare.runs_document(runs, baseline))


def may_be_a_run(name: str) -> bool:
    """`runs/*` also names the room of the studies and other folders, which are passed over."""
    path = Path(name)
    return not is_dir(path) or is_file(path / "run.json")
