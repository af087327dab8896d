"""Grading one hand-in: every figure from its step records, its weights tested again, its first steps trained again, its code tried.

What is found is a list of marks, one for each task. A mark says what was found and why; whatever a noisy machine could have decided
does not take points.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import msgspec

from lockstep.errors import InputError
from lockstep.lab import again, chain, figures, own_code, seal
from lockstep.lab.again import Answer
from lockstep.lab.definition import CODE, Lab, Task
from lockstep.lab.folder import ANSWERS
from lockstep.lab.hand_in import LAB, Submission, submission
from lockstep.lab.inspect import Inspected, fits, inspect
from lockstep.lab.own_code import RACE_S, Verdict
from lockstep.lab.patience import Patience
from lockstep.reading import Damaged, read_end, read_shape
from lockstep.text import is_text, last_line, listed, printable

Outcome = Literal["right", "wrong", "missing", "by hand", "not settled"]
Tell = Callable[[str], None]
# Between a run's own date and its records in the ledger: kernels may be compiled meanwhile.
CLOCK_S = 600.0
CHANGED = "is not what was handed in: the ledger has another SHA-256 of it"


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
    foreign: bool = False
    """Its ledger names somebody else."""
    created: float = 0.0
    """When it was made."""
    newer: str = ""
    """The file that the same student has handed in later: that one counts."""
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
    handed_in: bool = True,
) -> Graded:
    """Grade a hand-in by a lab. What is wrong with it is in the result; only a lab that is wrong itself raises InputError.

    `handed_in`: else it is a student's own folder, which may have changed since.
    """
    begun = time.monotonic()
    graded = Graded(str(file), _name_of(file), lab.name, lab.title)
    try:
        with submission(file) as handed:
            graded.student = handed.student or graded.student
            graded.created = handed.manifest.created
            graded.begun = handed.chain.records[0].hash if handed.chain.records else ""
            if handed.manifest.lab != lab.name:
                raise InputError(f"it is a hand-in of lab '{printable(handed.manifest.lab)[:40]}', not of '{lab.name}'")
            changed = _changed(handed) if handed_in else []
            _Grading(handed, lab, template, data_root, tell, race_s, graded, changed).all()
    except Exception as error:
        # Whatever a hand-in holds, the others of the class get their grades.
        _nothing(graded, error, lab)
    graded.seconds = time.monotonic() - begun
    return graded


def ungradable(file: Path, error: Exception, lab: Lab | None) -> Graded:
    """What is no hand-in has a page, too."""
    return _nothing(Graded(str(file), _name_of(file), lab.name if lab else "?", lab.title if lab else ""), error, lab)


def _nothing(graded: Graded, error: Exception, lab: Lab | None) -> Graded:
    """No points, and why."""
    expected = isinstance(error, InputError | OSError)
    said = str(error) if expected else f"grading it failed: {type(error).__name__}: {error}"
    graded.flags.append(printable(said.removeprefix(f"{graded.file}: ")))
    tasks = lab.tasks if lab else []
    graded.marks = [Mark(task.name, "wrong", 0.0, task.worth, ["nothing could be graded"]) for task in tasks]
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
        changed: list[str],
    ) -> None:
        self._handed, self._lab, self._template = handed, lab, template
        self._data_root, self._tell, self._race_s = data_root, tell, race_s
        self._graded, self._changed = graded, changed
        self._runs: dict[str, Inspected] = {}
        self._verdicts: dict[str, Verdict] = {}

    def all(self) -> None:
        ledger, graded = self._handed.chain, self._graded
        broken = ledger.problems()
        graded.flags += broken
        others = _other_names(self._handed)
        graded.foreign = bool(others)
        graded.flags += others
        graded.flags += [f"{name} {CHANGED}" for name in self._changed]
        graded.notes += self._handed.problems
        self._read_runs()
        self._compute_again()
        self._try_code()
        for task in self._lab.tasks:
            graded.marks.append(self._mark(task))
        for found in self._runs.values():
            said = [*found.problems, found.unsettled and f"not settled, and has its points: {found.unsettled}"]
            graded.flags += [f"run '{found.run.id}' (task {found.task}): {text}" for text in said if text]
            graded.notes += [f"run '{found.run.id}' (task {found.task}): {note}" for note in found.notes]
        graded.flags += _twins(list(self._runs.values()))
        graded.prints = {(found.task, found.run.id): found.fingerprints() for found in self._runs.values()}
        if broken:  # its order proves nothing, and the figures hang on it
            for mark in graded.marks:
                if mark.outcome in ("right", "not settled") and self._lab.task(mark.task).kind in (
                    "run",
                    "predict",
                    "claim",
                ):
                    mark.outcome, mark.points = "wrong", 0.0
                    mark.lines.append("the ledger is broken, so it is not known when this was measured")
        for name, starts in ((task.name, len(ledger.of("start", task.name))) for task in self._lab.of_kind("run")):
            if starts > 1:
                graded.notes.append(f"'{name}' was started {starts} times, and the last run is graded")

    # ---- runs

    def _read_runs(self) -> None:
        ledger = self._handed.chain
        for task in self._lab.of_kind("run"):
            record = ledger.newest("run", task.name)
            if record is None:
                continue
            name, digests = str(record.body.get("run")), record.body.get("seal")
            found = Inspected(task.name, self._handed.run("?"))
            if name in ("", ".", "..") or "/" in name or not isinstance(digests, dict):
                found.problems.append("its record in the ledger names no run, or has no seal")
            else:
                run = self._handed.run(name)
                found = inspect(task.name, run)
                started = [one for one in ledger.of("start", task.name) if one.body.get("run") == name]
                if not started:
                    found.problems.append("the ledger has no record of its start")
                elif found.spec is not None:
                    unlike = fits(self._lab, task, found.spec, ledger.seed(started[0].number))
                    found.asked_for = not unlike
                    found.problems += unlike
                    if found.spec.id != name:
                        found.problems.append(f"its run.json is that of run '{printable(found.spec.id)[:60]}'")
                    if not started[0].time - CLOCK_S <= found.spec.created <= record.time + CLOCK_S:
                        found.problems.append("it was made at another time than its ledger says")
                found.problems += [text.removeprefix(f"run {run.id}: ") for text in seal.broken(run, digests)]
            self._runs[task.name] = found

    def _compute_again(self) -> None:
        """What ends before all runs have their answers was ended by the first that has none: the others are asked again."""
        asked = {
            found.run.folder: found for found in self._runs.values() if found.asked_for and all(map(len, found.rows))
        }
        if asked:
            self._tell(f"{self._graded.student}: testing {len(asked)} models again")
        while left := [path for path, found in asked.items() if found.again is None]:
            answers, why = self._answers(left)
            for path in left:
                asked[path].again = answers.get(str(path), why)
                if str(path) not in answers:
                    break
        for found in asked.values():
            assert found.again is not None
            recorded = found.run.summary() or {}
            unlike = again.compare(found.run, found.again, found.rows, recorded)
            found.problems += unlike
            found.unsettled = "" if found.problems else found.again.unsettled
            # Two machines may differ in the last few samples, and what students see and claim is the recorded one.
            found.test_accuracy = found.again.accuracy if unlike else recorded.get("test_accuracy")

    def _answers(self, runs: list[Path]) -> tuple[dict[str, Answer], Answer]:
        """In a process of its own: loading weights and a recipe may fail in many ways. And what there is to say of a run without an answer."""
        with TemporaryDirectory(prefix="lockstep-again-") as place:
            folder = Path(place)
            request = again.Request(runs=[str(path) for path in runs], data_root=self._data_root)
            (folder / "request.json").write_bytes(msgspec.json.encode(request))
            argv = [sys.executable, "-m", "lockstep.lab.again", str(folder)]
            # It counts the time of each run itself, and this ends what does not let it.
            patience = Patience(cpu_s=(again.LIMIT_S + again.MORE_S) * len(runs))
            ended, _ = own_code.run_child(argv, folder, folder, patience)
            answers: dict[str, Answer] = {}
            with suppress(Damaged):
                answers = read_shape(folder / "answers.json", dict[str, Answer]) or {}
            if ended == "over":
                return answers, Answer(
                    problem=printable(last_line(read_end(folder / own_code.LOG)))[:200] or "no answer"
                )
            why = "the machine was too busy" if ended == "starved" else ended
            open_ = Answer(unsettled=f"it could not be computed again here: {why}; grade it again")
            if ended == "starved":  # the others would be, too
                answers = {str(path): answers.get(str(path), open_) for path in runs}
            return answers, open_

    # ---- tasks

    def _mark(self, task: Task) -> Mark:
        if task.kind in CODE:
            return self._mark_code(task)
        mark = self._mark_of_runs(task)
        unsettled = [
            found.unsettled for name in (task.name, *task.runs) if (found := self._runs.get(name)) and found.unsettled
        ]
        if mark.outcome == "right" and unsettled:
            mark.outcome = "not settled"
            mark.lines += unsettled
        return mark

    def _mark_of_runs(self, task: Task) -> Mark:
        by_kind = {"run": self._mark_run, "predict": self._mark_prediction, "claim": self._mark_claim}
        return by_kind.get(task.kind, self._mark_answer)(task)

    def _mark_run(self, task: Task) -> Mark:
        found = self._runs.get(task.name)
        if found is None:
            return Mark(task.name, "missing", 0.0, task.points, ["no run of this task was handed in"])
        if found.problems:
            return Mark(task.name, "wrong", 0.0, task.points, list(found.problems))
        told = [f"{len(found.rows[0])} steps on {len(found.rows)} ranks; {_accuracy(found)}"]
        if not found.unsettled:
            told[0] += ", found again"
        return Mark(task.name, "right", task.points, task.points, told)

    def _mark_prediction(self, task: Task) -> Mark:
        ledger = self._handed.chain
        record = ledger.newest("prediction", task.name)
        if record is None or not isinstance(record.body.get("value"), int | float):
            return Mark(task.name, "missing", 0.0, task.points, ["no prediction was committed"])
        number = float(record.body["value"])
        begun = [one for name in task.runs for one in ledger.of("start", name)]
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
        if ANSWERS in self._changed:
            return Mark(task.name, "wrong", 0.0, task.points, [f"{ANSWERS} {CHANGED}"])
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

    def _try_code(self) -> None:
        """All files first whether they are right, then how fast they are, with what is left of the time."""
        tasks = [task for task in self._lab.of_kind(*CODE) if self._handed.code(task.file).is_file()]
        tasks = [task for task in tasks if task.file not in self._changed]
        whole = own_code.allowance(tasks, self._race_s)
        for task in tasks:
            self._tell(f"{self._graded.student}: trying {task.file}")
            self._verdicts[task.name] = own_code.judged(task, self._handed.code(task.file), whole)
        for task in tasks:
            verdict = self._verdicts[task.name]
            if task.speed and verdict.right:
                self._tell(f"{self._graded.student}: racing {task.file}")
                speed = own_code.raced(task, self._handed.code(task.file), self._template, self._race_s, whole)
                self._verdicts[task.name] = msgspec.structs.replace(verdict, speed=speed)

    def _mark_code(self, task: Task) -> Mark:
        code = self._handed.code(task.file)
        if not code.is_file():
            return Mark(task.name, "missing", 0.0, task.worth, [f"{task.file} was not handed in"])
        if task.file in self._changed:
            return Mark(task.name, "wrong", 0.0, task.worth, [f"{task.file} {CHANGED}"])
        verdict = self._verdicts[task.name]
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
            if speed.unmeasured:
                self._graded.flags.append(f"'{task.name}': {speed.sentence(task.speed)}")
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


def _changed(handed: Submission) -> list[str]:
    """Code and answers that are not as the ledger's record of handing in has them."""
    records = handed.chain.of("hand-in")
    told = records[-1].body.get("files") if records else None
    digests = told if isinstance(told, dict) else {}
    there = {path.name: path for path in (handed.folder / LAB).iterdir() if path.name != chain.FILE}
    now = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in there.items()}
    return sorted(printable(name) for name in {*now, *digests} if now.get(name) != digests.get(name))
