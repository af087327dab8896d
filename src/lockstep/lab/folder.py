"""A student's lab folder: made from a template, predictions committed, runs measured. hand_in.py makes one file of it.

lab.toml, README.md    what is asked for
answers.toml           the student's claims and answers
*.py                   the student's code, where a task asks for some
ledger.jsonl           predictions and runs in their order (chain.py)
runs/                  what `lockstep lab run` has trained
"""

from __future__ import annotations

import math
import shlex
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep import toml
from lockstep.errors import InputError
from lockstep.files import write_atomically
from lockstep.lab import chain, definition, figures, readme, seal
from lockstep.lab.chain import Chain
from lockstep.lab.definition import Task
from lockstep.lab.figures import Measured
from lockstep.launch import execute, prepare
from lockstep.launch.api import check
from lockstep.launch.supervise import Progress
from lockstep.measure.records import check_steps
from lockstep.reading import Damaged, exists
from lockstep.run import Options, Run
from lockstep.settings import is_key
from lockstep.text import is_text
from lockstep.words import read_words

ANSWERS = "answers.toml"
RUNS = "runs"
LONGEST_NAME = 100


class LabFolder:
    """One student's lab."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lab = definition.read(path)
        self.chain = Chain.read(path / chain.FILE)

    @property
    def ledger(self) -> Path:
        return self.path / chain.FILE

    @property
    def runs(self) -> Path:
        return self.path / RUNS

    @property
    def student(self) -> str:
        """Whose it is: as its first record says, or as it was handed in."""
        said = [str(one.body.get("student", "")) for one in self.chain.records if one.kind in ("lab", "hand-in")]
        return next((name for name in said if name), "")

    def check_chain(self) -> None:
        """Before anything is added to it."""
        for problem in self.chain.problems():
            raise InputError(f"{problem}; nothing can be added to a broken ledger: begin anew with 'lockstep lab new'")

    # ---- what students do

    def predict(self, numbers: dict[str, float]) -> None:
        """Commit predictions. One whose runs were begun is too late; InputError then, and nothing is written."""
        self.check_chain()
        for name, number in numbers.items():
            task = self.lab.task(name, "predict")
            if not math.isfinite(number):
                raise InputError(f"{name}={number}: give a finite number")
            if begun := [run for run in task.runs if self.chain.of("start", run)]:
                raise InputError(f"{name}: it is too late to predict it, since '{begun[0]}' was measured already")
        for name, number in numbers.items():
            self.chain.append(self.ledger, "prediction", task=name, value=number)

    def measure(
        self, name: str, words: tuple[str, ...], tell: Callable[[str], None], progress: Progress | None = None
    ) -> Run:
        """Train what a task asks for, with the seed that the ledger gives, and seal the run."""
        self.check_chain()
        task = self.lab.task(name, "run")
        if missing := [
            one.name for one in self.lab.predictions_before(name) if not self.chain.of("prediction", one.name)
        ]:
            wanted = " ".join(f"{one}=NUMBER" for one in missing)
            raise InputError(f"{name}: state what you expect before you measure: lockstep lab predict {wanted}")
        words_of_all = (*shlex.split(self.lab.words), *shlex.split(task.words), *self._chosen(task, words))
        recipe, placement = read_words(words_of_all, {"seed": self.chain.seed()})
        name_of_run = f"{name}-{len(self.chain.of('start', name)) + 1}"
        if exists(self.runs / name_of_run):
            raise InputError(f"{self.runs / name_of_run} is in the way, and is not in the ledger: move it away")
        run, spec = prepare(recipe, placement, Options(), self.runs, name_of_run, check=lambda spec: check(spec, tell))
        # Every start is on record: a run that was thrown away shows.
        self.chain.append(self.ledger, "start", task=name, run=run.id, words=list(words), created=spec.created)
        tell(spec.plan.line())
        execute(run, spec, progress=progress)
        self.chain.append(self.ledger, "run", task=name, run=run.id, seal=seal.seal(run))
        return run

    def _chosen(self, task: Task, words: tuple[str, ...]) -> tuple[str, ...]:
        """The student's own words, if the task leaves these keys open."""
        for word in words:
            key, equals, _ = word.partition("=")
            if not equals or not is_key(key):
                raise InputError(f"'{word}' is not key=value, for example {(task.free or ['optimizer.lr'])[0]}=…")
            if key not in task.free:
                open_ = f"choose {', '.join(task.free)}" if task.free else "it leaves nothing open"
                raise InputError(f"{word}: task '{task.name}' states its settings; {open_}")
        if missing := [key for key in task.free if key not in [word.partition("=")[0] for word in words]]:
            raise InputError(
                f"task '{task.name}' leaves {missing[0]} to you: lockstep lab run {task.name} {missing[0]}=…"
            )
        return words

    # ---- what is there

    def run_of(self, task: str) -> Run | None:
        """The newest run of a task that ended well; None where its folder is gone, too."""
        record = self.chain.newest("run", task)
        run = Run(self.runs / str(record.body.get("run"))) if record else None
        return run if run and exists(run.folder / seal.SPEC) else None

    def predicted(self, task: str) -> float | None:
        record = self.chain.newest("prediction", task)
        return None if record is None else float(record.body["value"])

    def revealed(self, task: Task) -> float | None:
        """The figure of a prediction or a claim, as the student's own records have it; None while a run is missing."""
        runs = [self.run_of(name) for name in task.runs]
        if any(run is None for run in runs):
            return None
        parts = dict(zip(task.runs, (recorded(run) for run in runs if run), strict=True))
        with suppress(ValueError, ZeroDivisionError):
            return figures.value(task.figure, parts[task.of], parts.get(task.over), parts.get(task.minus))
        return None

    def answers(self) -> tuple[dict[str, float], dict[str, str], list[str]]:
        """Claims and answers, and what cannot be read in answers.toml."""
        return read_answers(self.path / ANSWERS)


def read_answers(path: Path) -> tuple[dict[str, float], dict[str, str], list[str]]:
    try:
        content = toml.read(path, "answers")
    except InputError as error:
        return {}, {}, [str(error)]
    claims, answers, problems = {}, {}, []
    for name, value in _table(content, "claims").items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            claims[name] = float(value)
        else:
            problems.append(f"{ANSWERS}: claims.{name} is not a number")
    for name, value in _table(content, "answers").items():
        if isinstance(value, str) and value.strip():
            answers[name] = value.strip()
    return claims, answers, problems


def _table(content: dict[str, Any], name: str) -> dict[str, Any]:
    found = content.get(name, {})
    return found if isinstance(found, dict) else {}


def recorded(run: Run) -> Measured:
    """A run by its own records; its accuracy as it was written down."""
    spec = run.spec()
    rows = []
    for rank in range(spec.plan.ranks):
        found = check_steps(run.rank_folder(rank) / "steps.bin")
        if not len(found):
            raise Damaged(f"run {run.id}: rank {rank} has no step records")
        rows.append(found)
    return Measured.of(run, rows, (run.summary() or {}).get("test_accuracy"))


def make(name: str, folder: Path, student: str) -> LabFolder:
    """A new lab folder. One that is there already is left as it is."""
    source = definition.find(name)
    lab = definition.read(source)
    if len(student) > LONGEST_NAME or not is_text(student) or not (student.isprintable() or not student):
        raise InputError(f"--student: give a name in plain text, of at most {LONGEST_NAME} characters")
    if exists(folder):
        raise InputError(f"{folder} is there already: name another folder, lockstep lab new {lab.name} FOLDER")
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise InputError(f"cannot make {folder}: {error.strerror}") from None
    try:
        for path in sorted(source.iterdir()):
            if path.is_file() and path.suffix in (".py", ".toml") and not path.name.startswith(("reference", ".")):
                write_atomically(folder / path.name, path.read_bytes())
        write_atomically(folder / "README.md", readme.student_page(lab, _intro(source)).encode())
        write_atomically(folder / ANSWERS, readme.answers_template(lab).encode())
        body = {"lab": lab.name, "student": student, "nonce": chain.nonce(), "lab_sha256": definition.digest(folder)}
        Chain([]).append(folder / chain.FILE, "lab", **body)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return LabFolder(folder)


def _intro(source: Path) -> str:
    path = source / "README.md"
    return path.read_text(encoding="utf-8") if path.is_file() else ""
