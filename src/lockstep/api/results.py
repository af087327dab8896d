"""What the functions return: objects that show themselves, as text at a prompt and with plots in a notebook."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import LockstepError
from lockstep.metrics import METRICS
from lockstep.run import Run as RunFolder
from lockstep.run import runs_root
from lockstep.units import counted

if TYPE_CHECKING:
    from lockstep.explain.asked import Explained
    from lockstep.explain.finding import Finding
    from lockstep.report.subject import Subject
    from lockstep.report.views import Part
    from lockstep.study.folder import StudyFolder
    from lockstep.turns.estimate import Ratio, Window
    from lockstep.turns.folder import RaceFolder, Record
    from lockstep.verify.checks import Check
    from lockstep.verify.prove import Verdict


class Shown(ABC):
    """Shows the part of the report's document that it is about."""

    _figures: Sequence[str] = ()
    """Which of its facts are part of the answer in a few lines."""

    @abstractmethod
    def _part(self) -> Part: ...

    def __repr__(self) -> str:
        from lockstep.report.inline import plain

        try:
            return plain(self._part(), self._figures)
        except LockstepError as error:  # a folder that cannot be read
            return f"{type(self).__name__}: {error}"

    def _repr_html_(self) -> str | None:
        """None where it cannot be read: then the text is shown, which says why."""
        from lockstep.report.inline import html

        try:
            return html(self._part())
        except LockstepError:
            return None


class Run(Shown, RunFolder):
    """A run folder: `summary()`, `epochs()`, `spec()`, `status()`, `environment()`, `folder`."""

    _figures = tuple(METRICS[name].label for name in ("accuracy", "seconds", "images_per_second"))

    @classmethod
    def find(cls, name: str = "last", root: Path | None = None) -> Run:
        """A run by path, by id, by the beginning of its id, or 'last'; `root` is the folder of runs."""
        return cls(RunFolder.find(name, runs_root(root)).folder)

    def _part(self) -> Part:
        from lockstep.report import curves, steps
        from lockstep.report.document import part
        from lockstep.report.subject import of_runs

        return part(of_runs([self]), (steps, curves), details=False)


class RaceResult(Shown):
    """A race: who is faster than the first contender, and by how much."""

    def __init__(self, folder: RaceFolder) -> None:
        self._folder = folder

    @property
    def folder(self) -> Path:
        return self._folder.path

    @cached_property
    def record(self) -> Record:
        """Contenders, budget, machine, and what was found."""
        return self._folder.read()

    @cached_property
    def windows(self) -> list[Window]:
        """All that was measured."""
        return self._folder.windows()

    @property
    def ratios(self) -> list[Ratio]:
        """Of each contender but the first: the time of an image as a multiple of the first one's, with its interval and verdict."""
        return self.record.ratios

    def _part(self) -> Part:
        from lockstep.report.race import race_part

        return race_part(self.record, self.windows, self.folder.name)


class Explanation(Shown):
    """Findings, the costliest first: verdict, why, what to do next. Of a study, those of each cell."""

    def __init__(self, found: list[Explained], most: int | None) -> None:
        self._found, self._most = found, most

    @property
    def findings(self) -> list[Finding]:
        """All of them; of a study, those of its first cell are first."""
        return [finding for each in self._found for finding in each.findings]

    def _part(self) -> Part:
        from msgspec.structs import replace

        from lockstep.report import steps
        from lockstep.report.document import part
        from lockstep.report.findings import said, shared
        from lockstep.report.subject import of_runs
        from lockstep.report.views import About

        whole = shared([About(each.label, [said(finding) for finding in each.findings]) for each in self._found])
        about = [About(each.name, each.findings[: self._most]) for each in whole]
        first = self._found[0].evidence
        alone = replace(part(of_runs([first.run]), (steps,), details=False), headlines=[])
        if len(self._found) > 1:
            return replace(
                alone, name=counted(len(self._found), "cell"), facts=[], findings=about, tables=[], charts=[], notes=[]
            )
        ranks = [table for table in alone.tables if table.id == "ranks"]
        return replace(alone, about=first.spec.plan.line(), facts=[], findings=about, tables=ranks)


class StudyResult(Shown):
    """A study as far as it has come: its cells, compared with the baseline."""

    def __init__(self, folder: StudyFolder) -> None:
        self._folder = folder

    @property
    def folder(self) -> Path:
        return self._folder.path

    @cached_property
    def _subject(self) -> Subject:
        from lockstep.report.subject import of_study

        return of_study(self._folder)

    @property
    def comparison(self) -> dict[str, Any]:
        """What `lockstep study show --json` prints."""
        return self._subject.comparison

    @property
    def runs(self) -> list[Run]:
        return [Run(run.folder) for run in self._subject.runs]

    def _part(self) -> Part:
        from lockstep.report import curves, speed
        from lockstep.report.document import part

        return part(self._subject, (speed, curves), details=False)


class Proof(Shown):
    """What `verify` compared: whether N ranks compute what one process computes."""

    def __init__(self, verdict: Verdict) -> None:
        self._verdict = verdict

    @property
    def proven(self) -> bool:
        return self._verdict.proven

    @property
    def checks(self) -> list[Check]:
        return self._verdict.checks

    def __bool__(self) -> bool:
        return self.proven

    def _part(self) -> Part:
        from lockstep.report.views import Cell, Part, Said, Table

        failed = [check for check in self.checks if not check.passed]
        said = (
            f"{len(failed)} of {counted(len(self.checks), 'check')} failed: the placements do NOT compute the same"
            if failed
            else f"{counted(len(self.checks), 'check')} passed: the placements compute the same"
        )
        rows = [
            [
                Cell(check.what),
                Cell(check.against),
                Cell(f"{check.difference:.1e}", check.difference),
                Cell(f"{check.allowed:.1e}", check.allowed),
                Cell(check.verdict),
                Cell(check.where),
            ]
            for check in self.checks
        ]
        columns = ["check", "placements", "difference", "allowed", "", "at"]
        table = Table("checks", "Checks", "", columns, rows, right=[2, 3])
        return Part("verify", "verify", headlines=[Said("proof", said)], table=table, notes=self._verdict.lines)
