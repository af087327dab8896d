"""Grading one hand-in: every figure from its step records, its weights tested again, its first steps trained again, its code tried.

What is found is a list of marks, one for each task. A mark says what was found and why; whatever a noisy machine could have decided
does not take points.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import msgspec

from lockstep.errors import InputError
from lockstep.lab import again, figures, own_code, seal
from lockstep.lab.again import Answer
from lockstep.lab.definition import CODE, Lab, Task
from lockstep.lab.hand_in import Submission, submission
from lockstep.lab.inspect import Inspected, fits, inspect
from lockstep.lab.patience import PATIENCE
from lockstep.reading import Damaged, read_end, read_shape
from lockstep.text import is_text, last_line, listed, printable

Outcome = Literal["right", "wrong", "missing", "by hand", "not settled"]
Tell = Callable[[str], None]
RACE_S = 30.0
# Between a run's own date and its records in the ledger: kernels may be compiled meanwhile.
CLOCK_S = 600.0


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
    begun: str = ""
    """The hash of the ledger's first record: two folders that share it were one."""
    created: float = 0.0
    """When it was made."""
    seconds: float = 0.0

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
    def right(self) -> bool:
        """All that is graded here is right, and nothing is to be looked at."""
        return (
            not self.flags
            and bool(self.marks)
            and all(mark.outcome in ("right", "by hand", "not settled") for mark in self.marks)
        )


def grade(
    file: Path,
    lab: Lab,
    template: Path,
    data_root: str | None = None,
    tell: Tell = lambda _: None,
    race_s: float = RACE_S,
) -> Graded:
    """Grade a hand-in by a lab. What is wrong with it is in the result; only a lab that is wrong itself raises InputError."""
    begun = time.monotonic()
    graded = Graded(str(file), _name_of(file), lab.name, lab.title)
    try:
        with submission(file) as handed:
            graded.student = handed.student or graded.student
            graded.created = handed.manifest.created
            graded.begun = handed.chain.records[0].hash if handed.chain.records else ""
            if handed.manifest.lab != lab.name:
                raise InputError(f"it is a hand-in of lab '{printable(handed.manifest.lab)[:40]}', not of '{lab.name}'")
            _Grading(handed, lab, template, data_root, tell, race_s, graded).all()
    except Exception as error:
        # Whatever a hand-in holds, the others of the class get their grades.
        said = str(error) if isinstance(error, InputError) else f"grading it failed: {type(error).__name__}: {error}"
        graded.flags.append(printable(said.removeprefix(f"{file}: ")))
        graded.marks = [Mark(task.name, "wrong", 0.0, task.worth, ["nothing could be graded"]) for task in lab.tasks]
    graded.seconds = time.monotonic() - begun
    return graded


def _name_of(file: Path) -> str:
    name = file.name.removesuffix(".zip").removesuffix(".lab")
    return name if is_text(name) else ascii(name)


class _Grading:
    """The steps of grading one hand-in, in their order."""

    def __init__(
        self,
        handed: Submission,
        lab: Lab,
        template: Path,
        data_root: str | None,
        tell: Tell,
        race_s: float,
        graded: Graded,
    ) -> None:
        self._handed, self._lab, self._template = handed, lab, template
        self._data_root, self._tell, self._race_s = data_root, tell, race_s
        self._graded = graded
        self._runs: dict[str, Inspected] = {}

    def all(self) -> None:
        chain, graded = self._handed.chain, self._graded
        broken = chain.problems()
        graded.flags += broken
        graded.flags += _other_names(self._handed)
        graded.notes += self._handed.problems
        self._read_runs()
        self._compute_again()
        for task in self._lab.tasks:
            graded.marks.append(self._mark(task))
        for found in self._runs.values():
            graded.flags += [f"run '{found.run.id}' (task {found.task}): {problem}" for problem in found.problems]
            graded.notes += [f"run '{found.run.id}' (task {found.task}): {note}" for note in found.notes]
        graded.flags += _twins(list(self._runs.values()))
        graded.prints = {(found.task, found.run.id): found.fingerprints() for found in self._runs.values()}
        if broken:  # its order proves nothing, and the figures hang on it
            for mark in graded.marks:
                if mark.outcome == "right" and self._lab.task(mark.task).kind in ("run", "predict", "claim"):
                    mark.outcome, mark.points = "wrong", 0.0
                    mark.lines.append("the ledger is broken, so it is not known when this was measured")
        for name, starts in ((task.name, len(chain.of("start", task.name))) for task in self._lab.of_kind("run")):
            if starts > 1:
                graded.notes.append(f"'{name}' was started {starts} times, and the last run is graded")

    # ---- runs

    def _read_runs(self) -> None:
        chain = self._handed.chain
        for task in self._lab.of_kind("run"):
            record = chain.newest("run", task.name)
            if record is None:
                continue
            name, digests = str(record.body.get("run")), record.body.get("seal")
            found = Inspected(task.name, self._handed.run("?"))
            if name in ("", ".", "..") or "/" in name or not isinstance(digests, dict):
                found.problems.append("its record in the ledger names no run, or has no seal")
            else:
                run = self._handed.run(name)
                found = inspect(task.name, run)
                started = [one for one in chain.of("start", task.name) if one.body.get("run") == name]
                if not started:
                    found.problems.append("the ledger has no record of its start")
                elif found.spec is not None:
                    unlike = fits(self._lab, task, found.spec, chain.seed(started[0].number))
                    found.asked_for = not unlike
                    found.problems += unlike
                    if found.spec.id != name:
                        found.problems.append(f"its run.json is that of run '{printable(found.spec.id)[:60]}'")
                    if not started[0].time - CLOCK_S <= found.spec.created <= record.time + CLOCK_S:
                        found.problems.append("it was made at another time than its ledger says")
                found.problems += [text.removeprefix(f"run {run.id}: ") for text in seal.broken(run, digests)]
            self._runs[task.name] = found

    def _compute_again(self) -> None:
        """In a process of its own: loading weights and a recipe may fail in many ways."""
        asked = {
            found.run.folder: found for found in self._runs.values() if found.asked_for and all(map(len, found.rows))
        }
        if not asked:
            return
        self._tell(f"{self._graded.student}: testing {len(asked)} models again")
        with TemporaryDirectory(prefix="lockstep-again-") as place:
            folder = Path(place)
            request = again.Request(runs=[str(path) for path in asked], data_root=self._data_root)
            (folder / "request.json").write_bytes(msgspec.json.encode(request))
            argv = [sys.executable, "-m", "lockstep.lab.again", str(folder)]
            ended = own_code.run_child(argv, folder, folder, PATIENCE)
            try:
                answers = read_shape(folder / "answers.json", dict[str, Answer])
            except Damaged:
                answers = None
            if answers is None:
                said = printable(last_line(read_end(folder / own_code.LOG)))[:200]
                raise InputError(f"its runs could not be computed again: {said if ended == 'over' else ended}")
        for path, found in asked.items():
            answer = answers.get(str(path)) or Answer(problem="no answer")
            recorded = found.run.summary() or {}
            unlike = again.compare(found.run, answer, found.rows, recorded)
            found.problems += unlike
            # Two machines may differ in the last few samples, and what students see and claim is the recorded one.
            found.test_accuracy = answer.accuracy if unlike else recorded["test_accuracy"]

    # ---- tasks

    def _mark(self, task: Task) -> Mark:
        if task.kind in CODE:
            return self._mark_code(task)
        by_kind = {"run": self._mark_run, "predict": self._mark_prediction, "claim": self._mark_claim}
        return by_kind.get(task.kind, self._mark_answer)(task)

    def _mark_run(self, task: Task) -> Mark:
        found = self._runs.get(task.name)
        if found is None:
            return Mark(task.name, "missing", 0.0, task.points, ["no run of this task was handed in"])
        if found.problems:
            return Mark(task.name, "wrong", 0.0, task.points, list(found.problems))
        told = [f"{len(found.rows[0])} steps on {len(found.rows)} ranks; {_accuracy(found)}, found again"]
        return Mark(task.name, "right", task.points, task.points, told)

    def _mark_prediction(self, task: Task) -> Mark:
        chain = self._handed.chain
        record = chain.newest("prediction", task.name)
        if record is None or not isinstance(record.body.get("value"), int | float):
            return Mark(task.name, "missing", 0.0, task.points, ["no prediction was committed"])
        number = float(record.body["value"])
        begun = [one for name in task.runs for one in chain.of("start", name)]
        if any(one.number < record.number for one in begun):
            return Mark(task.name, "wrong", 0.0, task.points, ["the prediction came after the measurement"])
        told = f"predicted {figures.shown(number, task.unit)}"
        try:
            found = self._figure(task)
        except ValueError as error:
            return Mark(task.name, "wrong", 0.0, task.points, [f"{told}; not measured: {error}"])
        return Mark(
            task.name,
            "right",
            task.points,
            task.points,
            [f"{told}, before measuring {figures.shown(found, task.unit)}"],
        )

    def _mark_claim(self, task: Task) -> Mark:
        if task.name not in self._handed.claims:
            return Mark(task.name, "missing", 0.0, task.points, ["nothing is claimed in answers.toml"])
        claimed = self._handed.claims[task.name]
        try:
            found = self._figure(task)
        except ValueError as error:
            return Mark(task.name, "wrong", 0.0, task.points, [f"it cannot be computed: {error}"])
        told = (
            f"claimed {figures.shown(claimed, task.unit)}, and the step records say {figures.shown(found, task.unit)}"
        )
        if abs(claimed - found) <= task.within * max(abs(found), 1.0 if task.minus else 0.0):
            return Mark(task.name, "right", task.points, task.points, [told])
        return Mark(task.name, "wrong", 0.0, task.points, [told])

    def _figure(self, task: Task) -> float:
        """ValueError where a run of it is missing or wrong."""
        for name in task.runs:
            if name not in self._runs:
                raise ValueError(f"there is no run '{name}'")
            if self._runs[name].problems:
                raise ValueError(f"the records of run '{name}' are not sound")
        parts = {name: self._runs[name].measured for name in task.runs}
        try:
            return figures.value(task.figure, parts[task.of], parts.get(task.over), parts.get(task.minus))
        except ZeroDivisionError:
            raise ValueError(f"that of '{task.over}' is 0") from None

    def _mark_answer(self, task: Task) -> Mark:
        text = self._handed.answers.get(task.name)
        if not text:
            return Mark(task.name, "missing", 0.0, task.points, ["answers.toml has no answer"])
        return Mark(task.name, "by hand", 0.0, task.points, [printable(text)[:5000]])

    def _mark_code(self, task: Task) -> Mark:
        code = self._handed.code(task.file)
        if not code.is_file():
            return Mark(task.name, "missing", 0.0, task.worth, [f"{task.file} was not handed in"])
        self._tell(f"{self._graded.student}: trying {task.file}")
        verdict = own_code.tried(task, code, self._template, self._race_s)
        if not verdict.settled:
            self._graded.notes.append(f"'{task.name}' is not settled, and has its points: {verdict.why}")
            return Mark(task.name, "not settled", task.worth, task.worth, [verdict.why])
        mark = Mark(task.name, "right" if verdict.right else "wrong", 0.0, task.worth, [verdict.why])
        if not verdict.right:
            return mark
        mark.points = task.points
        if task.speed:
            speed = verdict.speed or own_code.Speed()
            mark.lines.append(speed.sentence(task.speed))
            if speed.loses(task.speed):
                mark.outcome = "wrong"
            else:
                mark.points += task.speed_points
        return mark


def _accuracy(found: Inspected) -> str:
    return "no accuracy" if found.test_accuracy is None else f"{found.test_accuracy:.2%} test accuracy"


def _twins(runs: Sequence[Inspected]) -> list[str]:
    """One run that was handed in for two tasks."""
    return [
        f"run '{one.run.id}' has the records of run '{other.run.id}'"
        for at, one in enumerate(runs)
        for other in runs[:at]
        if one.rows and one.moments() == other.moments()
    ]


def _other_names(handed: Submission) -> list[str]:
    """Whom else the ledger names: a folder that was given away still has the name of who began it."""
    said = (str(one.body.get("student") or "") for one in handed.chain.records if one.kind in ("lab", "hand-in"))
    others = sorted({printable(name) for name in said} - {"", handed.student})
    return [f"its ledger names somebody else: {listed(others)[:200]}"] if others else []


def find_copies(everyone: Sequence[Graded]) -> None:
    """Flag runs that are in two hand-ins, under whatever name, and folders that were one. Their tasks lose their points in both."""
    for at, one in enumerate(everyone):
        for other in everyone[:at]:
            same_folder = bool(one.begun) and one.begun == other.begun
            if same_folder and one.student == other.student:
                older, newer = sorted((one, other), key=lambda graded: graded.created)
                older.notes.append(f"handed in again later ({Path(newer.file).name}): the newer one counts")
                newer.notes.append(f"handed in before ({Path(older.file).name}): the newer one counts")
                continue
            for (task, mine), prints in one.prints.items():
                for (their_task, theirs), their_prints in other.prints.items():
                    if prints & their_prints:
                        said = "run '{}' is run '{}' of {}: one of them is a copy"
                        _flag(one, task, said.format(mine, theirs, other.student))
                        _flag(other, their_task, said.format(theirs, mine, one.student))
            if same_folder:
                for each, with_whom in ((one, other), (other, one)):
                    each.flags.append(
                        f"its lab folder is a copy of that of {with_whom.student} ({Path(with_whom.file).name})"
                    )


def _flag(graded: Graded, task: str, text: str) -> None:
    graded.flags.append(text)
    for mark in graded.marks:
        if mark.task == task and mark.outcome == "right":
            mark.outcome, mark.points = "wrong", 0.0
            mark.lines.append("its run is in another student's hand-in, too")
