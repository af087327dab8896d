"""What grading one hand-in has come to: a mark for each task, and what a teacher has to look at."""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from lockstep.errors import InputError
from lockstep.lab.definition import Lab
from lockstep.text import is_text, printable

Outcome = Literal["right", "wrong", "missing", "by hand", "not settled"]
# What a machine answers where it has no more room: no fault of what was handed in.
LACKING = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE)


@dataclass
class Mark:
    """What a task was found to be worth."""

    task: str
    outcome: Outcome
    points: float
    of: float
    lines: list[str] = field(default_factory=list)


@dataclass
class Graded:
    """One student's hand-in."""

    file: str
    student: str
    lab: str
    title: str = ""
    marks: list[Mark] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    """What a teacher has to look at: records that were edited, copied, or are not what they claim to be."""
    notes: list[str] = field(default_factory=list)
    prints: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    """Of each task and its run the fingerprints, to find copies in other hand-ins. Students name their runs."""
    tested: dict[str, bool] = field(default_factory=dict)
    """Of each run, by its task, whether its model.pt was tested again."""
    begun: str = ""
    """The hash of the ledger's first record: two folders that share it were one."""
    named: bool = True
    """It says whose it is; else `student` is where it was found."""
    foreign: bool = False
    """Its ledger names somebody else."""
    created: float = 0.0
    """When it was made."""
    newer: str = ""
    """The file that was handed in later of the same folder: that one counts."""
    namesake: str = ""
    """Another hand-in under the same name, of another folder: whose that is only the teacher knows."""
    seconds: float = 0.0

    @property
    def file_name(self) -> str:
        return Path(self.file).name or self.file

    @property
    def points(self) -> float:
        return sum(mark.points for mark in self.marks)

    @property
    def of(self) -> float:
        """Without what is graded by hand."""
        return sum(mark.of for mark in self.marks if mark.outcome != "by hand")

    @property
    def by_hand(self) -> float:
        return sum(mark.of for mark in self.marks if mark.outcome == "by hand")

    @property
    def counts(self) -> str:
        """Whether it counts, of all that its student has handed in."""
        if self.newer:
            return f"no: {self.newer} is newer"
        return f"to decide: {self.namesake} has the same name" if self.namesake else "yes"

    @property
    def right(self) -> bool:
        """All that is graded here is right, and nothing is to be looked at."""
        return (
            not self.flags
            and bool(self.marks)
            and all(mark.outcome in ("right", "by hand", "not settled") for mark in self.marks)
        )


def ungradable(file: Path, error: Exception, lab: Lab | None) -> Graded:
    """What is no hand-in has a page, too."""
    graded = Graded(str(file), name_of(file), lab.name if lab else "?", lab.title if lab else "", named=False)
    return nothing(graded, error, lab)


def nothing(graded: Graded, error: Exception, lab: Lab | None) -> Graded:
    """No points, and why. Where this machine is the cause nothing is settled, which takes no points."""
    tasks = lab.tasks if lab else []
    if lack := lacking(error):
        graded.flags.append(f"not graded, and has its points: {lack}; grade it again")
        graded.marks = [Mark(task.name, "not settled", task.worth, task.worth, [lack]) for task in tasks]
        for mark, task in zip(graded.marks, tasks, strict=True):
            if task.kind == "answer":  # nobody but the teacher gives points for it
                mark.outcome, mark.points = "by hand", 0.0
        return graded
    expected = isinstance(error, InputError | OSError)
    said = str(error) if expected else f"grading it failed: {type(error).__name__}: {error}"
    graded.flags.append(printable(said.removeprefix(f"{graded.file}: ")))
    graded.marks = [Mark(task.name, "wrong", 0.0, task.worth, ["nothing could be graded"]) for task in tasks]
    return graded


def lacking(error: BaseException | None) -> str:
    """What this machine has too little of, where that is behind an error; "" where it is not. Errors of one line hide what they came from."""
    while error is not None:
        if isinstance(error, MemoryError):
            return "this machine has too little memory"
        if isinstance(error, OSError) and error.errno in LACKING:
            return f"this machine has too little room: {error.strerror}"
        error = error.__cause__ or error.__context__
    return ""


def name_of(file: Path) -> str:
    """The name of a file or folder, where nothing says whose it is."""
    name = file.absolute().name.removesuffix(".zip").removesuffix(".lab")
    return name if is_text(name) else ascii(name)
