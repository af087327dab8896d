"""What the analyzers look at: one run, and the runs it can be compared with."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from statistics import fmean
from typing import Any

from lockstep import index
from lockstep.measure.phases import Parts, Rows
from lockstep.measure.view import RunView, view
from lockstep.reading import Damaged, is_file
from lockstep.run import Run, Spec
from lockstep.study.folder import ROOM, StudyFolder
from lockstep.study.gather import Group, of_study
from lockstep.ways import Way

# A run is explained beside others of its task; of ten thousand, those nearest in time.
PEERS_EACH_WAY = 25


def same_task(run: Run) -> list[RunView]:
    """Finished runs of the same model and data next to it in time: the same ones for `lockstep explain` and for every report."""
    recipe, root = run.spec().recipe, run.folder.parent
    task = (recipe.model, recipe.data)
    same = [row for row in index.rows(root) if (row.get("model"), row.get("data")) == task]
    names = [row["id"] for row in same if row["state"] == "done"]
    place = names.index(run.id) if run.id in names else len(names)
    near = names[max(0, place - PEERS_EACH_WAY) : place] + names[place + 1 : place + 1 + PEERS_EACH_WAY]
    peers = [view(Run(root / name)) for name in near]
    return [peer for peer in peers if peer.state == "done"]  # it may have been damaged since it was listed


def study_of(run: Run) -> list[Group]:
    """The cells of the study that a run was made for; none if it is not of a study, or if that is gone."""
    part = run.spec().part
    folder = StudyFolder(run.folder.parent / ROOM / part.study) if part else None
    if folder is None or not is_file(folder.path / "study.json"):
        return []
    try:
        return of_study(folder, folder.read())
    except Damaged:
        return []


class Evidence:
    """One finished run. `peers` are other finished runs: of the study, or of the same folder of runs."""

    def __init__(
        self,
        run: Run,
        peers: Sequence[Run] = (),
        target: float | None = None,
        cells: Sequence[Group] = (),
    ) -> None:
        """`target`: the accuracy that a recommendation is for; by default the one that all runs reached. `cells`: of the run's
        study, with the trainings that they share."""
        self.run, self.target, self.cells = view(run), target, cells
        self.peers = [view(peer) for peer in peers if peer.id != run.id]

    @property
    def spec(self) -> Spec:
        return self.run.spec()

    @property
    def summary(self) -> dict[str, Any]:
        return self.run.summary() or {}

    @property
    def epochs(self) -> list[dict[str, Any]]:
        return self.run.epochs()

    @cached_property
    def ranks(self) -> list[Rows]:
        """Every rank's steps after warm-up, cut to the steps that all ranks have."""
        return self.run.after_warmup()

    @property
    def step(self) -> Parts:
        """Mean seconds of each part of a step over all ranks, and of the whole; empty if no step was recorded by all of them."""
        ranks = self.run.split()
        return {name: fmean(parts[name] for parts in ranks) for name in ranks[0]} if ranks else {}

    @property
    def ways(self) -> dict[str, Way]:
        return self.run.ways()
