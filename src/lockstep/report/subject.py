"""What a report is about: one run, some runs, or a study, each read once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from lockstep import index
from lockstep.errors import InputError
from lockstep.reading import is_dir, is_file
from lockstep.run import Run, Spec, runs_root
from lockstep.study import compare, gather
from lockstep.study.folder import StudyFolder
from lockstep.study.gather import Group
from lockstep.study.measures import USUAL

COLOURS = 8
# A run is explained beside others of its task: with ten thousand of them, those of about its time.
PEERS_EACH_WAY = 25


class ReadOnce(Run):
    """A run whose files are read at the first question: a report asks many, and its runs have ended, or are shown as they are now."""

    @cached_property
    def _spec(self) -> Spec:
        return super().spec()

    @cached_property
    def _status(self) -> dict[str, Any]:
        return super().status()

    @cached_property
    def _summary(self) -> dict[str, Any] | None:
        return super().summary()

    @cached_property
    def _environment(self) -> dict[str, Any]:
        return super().environment()

    @cached_property
    def _epochs(self) -> list[dict[str, Any]]:
        return super().epochs()

    def spec(self) -> Spec:
        return self._spec

    def status(self) -> dict[str, Any]:
        return self._status

    def summary(self) -> dict[str, Any] | None:
        return self._summary

    def environment(self) -> dict[str, Any]:
        return self._environment

    def epochs(self, rank: int | None = None) -> list[dict[str, Any]]:
        return self._epochs if rank is None else super().epochs(rank)


@dataclass(frozen=True)
class Colour:
    """The colour of a cell in every plot; from the ninth on they come again, dashed."""

    name: str
    again: bool


def colour(place: int) -> Colour:
    return Colour(f"c{place % COLOURS}", place % (2 * COLOURS) >= COLOURS)


@dataclass(frozen=True)
class Subject:
    """Cells with their runs, and the comparison of them."""

    name: str
    kind: Literal["run", "runs", "study"]
    groups: list[Group]
    comparison: dict[str, Any]
    study: StudyFolder | None = None

    @cached_property
    def runs(self) -> list[Run]:
        return [each.run for group in self.groups for each in group.samples]

    @cached_property
    def done(self) -> list[Group]:
        """Cells that have a finished run."""
        return [group for group in self.groups if group.done]

    @cached_property
    def begun(self) -> list[Group]:
        """Cells that have any run."""
        return [group for group in self.groups if group.samples]

    def place(self, group: Group) -> int:
        return self.groups.index(group)

    def colour(self, group: Group) -> Colour:
        return colour(self.place(group))

    @cached_property
    def peers(self) -> list[Run]:
        """Finished runs that its runs are explained beside: its own, and for a single run those of the same task next to it in time."""
        own = [each.run for group in self.done for each in group.done]
        return own if self.kind != "run" or not own else [*own, *_of_the_same_task(own[0])]


def of_names(names: Sequence[str], runs: Path | None) -> list[Subject]:
    """One subject for each study that is named, and one for all the runs together."""
    studies = {
        name: StudyFolder.find(name, runs) for name in names if name != "last"
    }  # 'last' is the last run, as with show
    found = [of_study(study) for study in studies.values() if study]
    others = [name for name in names if not studies.get(name) and _may_be_a_run(name)]
    if others:
        found.append(of_runs(gather.named(others, runs_root(runs))))
    if not found:
        raise InputError(f"{names[0]}: neither a run nor a study; 'lockstep runs' and 'lockstep study list' list them")
    return found


def of_study(folder: StudyFolder) -> Subject:
    groups = gather.of_study(folder, folder.read())
    for group in groups:
        for each in group.samples:
            each.run = ReadOnce(each.run.folder)
    return Subject(folder.name, "study", groups, compare.study_document(folder), folder)


def of_runs(runs: Sequence[Run]) -> Subject:
    once = [ReadOnce(run.folder) for run in runs]
    groups = gather.of_runs(once)
    if len(once) == 1:
        groups[0].name = once[0].id
        # A target of one run alone says nothing, and a loop of the user's own may have no accuracy to take it from.
        return Subject(once[0].id, "run", groups, compare.table(groups, None, USUAL, target=0.0))
    return Subject(f"{len(once)} runs", "runs", groups, compare.runs_document(once))


def _may_be_a_run(name: str) -> bool:
    """`runs/*` also names the room of the studies and other folders, which are passed over."""
    path = Path(name)
    return not is_dir(path) or is_file(path / "run.json")


def _of_the_same_task(run: Run) -> list[Run]:
    recipe, root = run.spec().recipe, run.folder.parent
    task = (recipe.model, recipe.data)
    same = [row for row in index.rows(root) if (row.get("model"), row.get("data")) == task]
    names = [row["id"] for row in same if row["state"] == "done"]
    place = names.index(run.id) if run.id in names else len(names)
    near = names[max(0, place - PEERS_EACH_WAY) : place] + names[place + 1 : place + 1 + PEERS_EACH_WAY]
    peers = [ReadOnce(root / name) for name in near]
    return [peer for peer in peers if peer.status()["state"] == "done"]  # it may have been damaged since it was listed
