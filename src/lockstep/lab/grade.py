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
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from lockstep.errors import InputError
from lockstep.lab import again, chain, definition, own_code, seal
from lockstep.lab.again import Answer
from lockstep.lab.chain import Chain, Record
from lockstep.lab.definition import CODE, Lab
from lockstep.lab.graded import Graded, name_of, nothing
from lockstep.lab.hand_in import LAB, Submission, submission
from lockstep.lab.inspect import Inspected, fits, inspect
from lockstep.lab.marks import Marks
from lockstep.lab.own_code import RACE_S, Verdict
from lockstep.lab.patience import Patience
from lockstep.reading import Damaged, read_end, read_shape
from lockstep.text import last_line, listed, printable

Tell = Callable[[str], None]
# Between a run's own date and its records in the ledger: kernels may be compiled meanwhile.
CLOCK_S = 600.0
# What a file is, by the ledger's record of handing in.
CHANGED = "is not what was handed in: the ledger has another SHA-256 of it"
MISSING = "was handed in, and is missing: the ledger has its SHA-256"
ADDED = "is not what was handed in: the ledger has no SHA-256 of it"


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
    graded = Graded(str(file), name_of(file), lab.name, lab.title)
    try:
        with submission(file) as handed:
            graded.student, graded.named = handed.student or graded.student, bool(handed.student)
            graded.created = handed.manifest.created
            graded.begun = handed.chain.records[0].hash if handed.chain.records else ""
            if handed.manifest.lab != lab.name:
                raise InputError(f"it is a hand-in of lab '{printable(handed.manifest.lab)[:40]}', not of '{lab.name}'")
            changed = _changed(handed) if handed_in else {}
            _Grading(handed, lab, template, data_root, tell, race_s, graded, changed).all()
    except Exception as error:
        # Whatever a hand-in holds, the others of the class get their grades.
        nothing(graded, error, lab)
    graded.seconds = time.monotonic() - begun
    return graded


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
        changed: dict[str, str],
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
        graded.flags += _other_lab(ledger, self._template)
        graded.flags += [f"{name} {what}" for name, what in self._changed.items()]
        graded.notes += self._handed.problems
        self._read_runs()
        self._compute_again()
        self._try_code()
        marks = Marks(self._handed, self._runs, self._verdicts, self._changed, graded)
        graded.marks = [marks.of(task) for task in self._lab.tasks]
        for found in self._runs.values():
            said = [*found.problems, found.unsettled and f"not settled, and has its points: {found.unsettled}"]
            graded.flags += [f"run '{found.run.id}' (task {found.task}): {text}" for text in said if text]
            graded.notes += [f"run '{found.run.id}' (task {found.task}): {note}" for note in found.notes]
        graded.flags += _twins(list(self._runs.values()))
        graded.tested = {found.task: found.tested for found in self._runs.values()}
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
                    if not _made_then(found.spec.created, started[0], record):
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
            limit_s = (again.LIMIT_S + again.MORE_S) * len(runs)
            patience = Patience(cpu_s=limit_s, wall_s=own_code.BUSY_S + limit_s)
            ended, _ = own_code.run_child(argv, folder, folder, patience)
            answers: dict[str, Answer] = {}
            with suppress(Damaged):
                answers = read_shape(folder / "answers.json", dict[str, Answer]) or {}
            if ended == "over":
                return answers, Answer(
                    problem=printable(last_line(read_end(folder / own_code.LOG)))[:200] or "no answer"
                )
            # None of a student's code runs in it: whoever ended it is the system, or somebody at this machine.
            whys = {"starved": "the machine was too busy", "killed": "it was killed, as where memory runs out"}
            why = whys.get(ended, ended)
            open_ = Answer(unsettled=f"it could not be computed again here: {why}; grade it again")
            if ended == "starved":  # the others would be, too
                answers = {str(path): answers.get(str(path), open_) for path in runs}
            return answers, open_

    # ---- code

    def _try_code(self) -> None:
        """All files first whether they are right, then how fast they are, with what is left of the time."""
        tasks = [task for task in self._lab.of_kind(*CODE) if self._handed.code(task.file).is_file()]
        tasks = [task for task in tasks if task.file not in self._changed]
        whole = own_code.allowance(tasks, self._race_s, own_code.slowness() if tasks else 1.0)
        for task in tasks:
            self._tell(f"{self._graded.student}: trying {task.file}")
            self._verdicts[task.name] = own_code.judged(task, self._handed.code(task.file), whole)
        for task in tasks:
            verdict = self._verdicts[task.name]
            if task.speed and verdict.right:
                self._tell(f"{self._graded.student}: racing {task.file}")
                speed = own_code.raced(task, self._handed.code(task.file), self._template, self._race_s, whole)
                self._verdicts[task.name] = msgspec.structs.replace(verdict, speed=speed)


def _made_then(created: float, start: Record, end: Record) -> bool:
    """Whether a run is as old as its ledger says. The start of a run in an older ledger has no `created`."""
    told = start.body.get("created")
    return created == told if told is not None else start.time - CLOCK_S <= created <= end.time + CLOCK_S


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


def _other_lab(ledger: Chain, template: Path) -> list[str]:
    """Whether its folder was made from another lab.toml: of a copy that was changed since, or of another version of Lockstep."""
    told = ledger.records[0].body.get("lab_sha256") if ledger.records else None
    if told in (None, definition.digest(template)):
        return []
    return [
        f"its lab folder was made from another {definition.FILE} than the one that it is graded by, of {_named(template)}: "
        "--lab FOLDER grades by yours"
    ]


def _named(template: Path) -> str:
    return f"Lockstep's '{template.name}'" if template.parent == definition.BUILTIN else str(template)


def _changed(handed: Submission) -> dict[str, str]:
    """Code and answers that are not as the ledger's record of handing in has them, and in which way."""
    records = handed.chain.of("hand-in")
    told = records[-1].body.get("files") if records else None
    digests = told if isinstance(told, dict) else {}
    there = {path.name: path for path in (handed.folder / LAB).iterdir() if path.name != chain.FILE}
    now = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in there.items()}
    return {
        printable(name): MISSING if name not in now else CHANGED if name in digests else ADDED
        for name in sorted({*now, *digests})
        if now.get(name) != digests.get(name)
    }
