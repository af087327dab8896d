"""What `lockstep explain` is asked about: one run, or one run of each cell of a study, and what they are explained beside."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from lockstep.errors import InputError
from lockstep.explain import explain
from lockstep.explain.evidence import Evidence, same_task, study_of
from lockstep.explain.finding import Finding
from lockstep.launch.supervise import Progress
from lockstep.measure.view import RunView
from lockstep.probe import measure
from lockstep.reading import Damaged
from lockstep.run import DAMAGED, Probe, Run, runs_root
from lockstep.study.folder import StudyFolder
from lockstep.study.gather import Group, of_study
from lockstep.ways import BESIDE

# Of a study's cells only what costs most is said.
MOST_PER_CELL = 3
Tell = Callable[[str], None]


class Explained(NamedTuple):
    label: str
    evidence: Evidence
    findings: list[Finding]


class Asked(NamedTuple):
    runs: dict[str, Run]
    """By what they are called: a cell's name, or a run's own."""
    peers: Sequence[RunView]
    cells: list[Group]
    study: StudyFolder | None

    @property
    def most(self) -> int | None:
        """How many findings of each are said; None: all."""
        return MOST_PER_CELL if self.study else None

    def explained(self, questions: tuple[str, ...] = (), target: float | None = None) -> Iterator[Explained]:
        for label, run in self.runs.items():
            evidence = Evidence(run, self.peers, target, self.cells)
            if damaged := evidence.run.rank_damage():
                raise Damaged(f"{run.id} is damaged and cannot be explained: {'; '.join(damaged)}")
            yield Explained(label, evidence, explain(evidence, questions))


def asked(name: str, runs: Path | None, tell: Tell) -> Asked:
    """A run or a study by its name. All of it has ended: to measure beside a run that is under way would disturb it."""
    study = None if name == "last" else StudyFolder.find(name, runs)
    found = _of_study(study, tell) if study else of_run(Run.find(name, runs_root(runs)))
    for run in found.runs.values():
        _check_ended(run)
    return found


def of_run(run: Run) -> Asked:
    return Asked({run.id: run}, same_task(run), study_of(run), None)


def _of_study(study: StudyFolder, tell: Tell) -> Asked:
    """One finished run of each cell, by the cell's name; all of the study's runs; and all of its cells."""
    cells = of_study(study, study.read())
    groups = [group for group in cells if any(each.own for each in group.done)]
    if not groups:
        raise InputError(f"study '{study.name}' has no finished run yet: lockstep study run {study.name}")
    runs = [each.run for group in groups for each in group.done if each.own]
    first: dict[str, Run] = {}
    for group in groups:
        whole = [each.run for each in group.done if each.own and not each.run.rank_damage()]
        if whole:
            first[group.name] = whole[0]
        else:
            own = next(each.run for each in group.done if each.own)
            tell(f"cell '{group.name}' is left out: its run {own.id} is damaged: {own.rank_damage()[0]}")
    if not first:
        raise Damaged(f"study '{study.name}': the runs of all its cells are damaged")
    return Asked(first, runs, cells, study)


def _check_ended(run: Run) -> None:
    status = run.status()
    if status["state"] == DAMAGED:
        raise Damaged(f"{run.id} is damaged and cannot be explained: {status['cause']}")
    if status["state"] != "done":
        raise InputError(
            f"{run.id} is {status['state']}: only a run that has ended well can be explained ('lockstep show' says more)"
        )


def measure_beside(run: Run, seconds: float, tell: Tell, progress: Progress) -> None:
    """Start the run's ranks again for a few seconds, to measure what its records cannot tell."""
    spec = run.spec()
    if spec.options.attached is not None:
        raise InputError(
            f"--measure: {run.id} is an attached command: measuring needs a recipe, to start its ranks again: leave --measure out"
        )
    if spec.options.own_loop:
        raise InputError(
            f"--measure: {run.id} is a training loop of your own, which only your script can take apart: leave --measure out"
        )
    if spec.placement.shares is not None:
        raise InputError(
            f"--measure: the ranks of {run.id} have unequal shares, which cannot be taken apart: leave --measure out"
        )
    if spec.placement.launcher == "slurm":
        tell("measuring as a Slurm job of its own")
    folder = run.folder / BESIDE
    shutil.rmtree(folder, ignore_errors=True)
    measure(spec.recipe, spec.placement, folder, Probe(seconds=seconds), spec.options.data_root, progress)
