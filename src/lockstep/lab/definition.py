"""A lab: what it asks for and what each task is worth, as its lab.toml says."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from lockstep import toml
from lockstep.errors import InputError
from lockstep.lab.figures import FIGURES
from lockstep.placement import Placement
from lockstep.plugins import is_spec
from lockstep.reading import exists, is_file
from lockstep.recipe import Recipe
from lockstep.settings import dotted, is_key
from lockstep.text import listed
from lockstep.words import read_words

FILE = "lab.toml"
BUILTIN = Path(__file__).parent / "builtin"
Kind = Literal["run", "predict", "claim", "answer", "all-reduce", "strategy", "kernel", "loop"]
CODE = ("all-reduce", "strategy", "kernel", "loop")
"""The kinds of tasks in which students write code."""
# Settings that may name a file of Python.
NAMES_CODE = ("model", "data", "loss", "metrics", "strategy", "launcher")
Word = Annotated[str, Meta(pattern="^[a-z0-9][a-z0-9-]{0,39}$")]
Points = Annotated[float, Meta(ge=0, le=1000)]


class Task(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One task. Which keys it has depends on its kind."""

    name: Word
    kind: Kind
    about: str
    points: Points
    words: str = ""
    """run: what is trained, beside the lab's own words."""
    free: list[str] = []
    """run: keys that the student chooses."""
    figure: str = ""
    """predict, claim: which figure (figures.py) …"""
    of: str = ""
    """… of which run …"""
    over: str = ""
    """… divided by that of this run …"""
    minus: str = ""
    """… or less that of this one."""
    within: Annotated[float, Meta(gt=0, le=1)] = 0.02
    """claim: how far from what the records say it may be, as a share."""
    file: str = ""
    """Code: the file that the student completes …"""
    object: str = ""
    """… and the function or class in it."""
    speed: Annotated[float, Meta(ge=0, le=100)] = 0.0
    """Code: points are lost where a race settles that it is slower than this many times the reference's speed; 0: speed does not count."""
    speed_points: Points = 0.0

    @property
    def runs(self) -> list[str]:
        """The tasks whose runs its figure is made of."""
        return [name for name in (self.of, self.over, self.minus) if name]

    @property
    def reference(self) -> str:
        """Beside lab.toml, the plain solution that its code is raced against."""
        return f"reference_{self.file}"

    @property
    def worth(self) -> float:
        return self.points + self.speed_points

    def asks(self) -> str:
        """Its figure in words."""
        label = FIGURES[self.figure].label
        if self.over:
            return f"{label} of '{self.of}', divided by that of '{self.over}'"
        return f"{label} of '{self.of}'" + (f", less that of '{self.minus}'" if self.minus else "")

    @property
    def unit(self) -> str:
        unit = FIGURES[self.figure].unit
        return "times" if self.over else "points" if self.minus and unit == "%" else unit


class Lab(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of lab.toml."""

    name: Word
    title: str
    about: str
    minutes: int
    """How long its commands take on two cores."""
    words: str = ""
    """What holds for all its runs."""
    tasks: Annotated[list[Task], Meta(min_length=1)]

    def task(self, name: str, *kinds: str) -> Task:
        """A task by its name; InputError lists those of the kind that is asked for."""
        fitting = [task for task in self.tasks if not kinds or task.kind in kinds]
        for task in fitting:
            if task.name == name:
                return task
        known = listed([task.name for task in fitting]) or "none"
        raise InputError(f"lab '{self.name}' has no {kinds[0] if kinds else 'task'} '{name}'; there are {known}")

    def of_kind(self, *kinds: str) -> list[Task]:
        return [task for task in self.tasks if task.kind in kinds]

    def predictions_before(self, run: str) -> list[Task]:
        """What has to be predicted before this task's run is measured."""
        return [task for task in self.of_kind("predict") if run in task.runs]

    def settings(self, task: Task) -> tuple[Recipe, Placement]:
        return read_words([*shlex.split(self.words), *shlex.split(task.words)])

    def stated(self, task: Task) -> set[str]:
        """The keys that lab and task state."""
        return {word.partition("=")[0] for word in (*shlex.split(self.words), *shlex.split(task.words)) if "=" in word}


def read(folder: Path) -> Lab:
    """The lab of a folder. InputError says what is wrong with its lab.toml."""
    path = folder / FILE
    if not is_file(path):
        raise InputError(f"{folder} is not a lab: it has no {FILE}; 'lockstep lab new NAME' makes one")
    content = toml.read(path, "lab")
    try:
        lab = msgspec.convert(content, Lab)
        for problem in _problems(lab, folder):
            raise ValueError(problem)
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None
    return lab


def read_template(folder: Path) -> Lab:
    """A lab to grade by: where speed counts, there is something to race against. A student's folder of it has no reference solutions."""
    lab = read(folder)
    for task in lab.of_kind(*CODE):
        if task.speed and not is_file(folder / task.reference):
            raise InputError(
                f"{folder}: task '{task.name}' grades speed, and there is no {task.reference} to race against: add it, or take out 'speed'"
            )
    return lab


def _problems(lab: Lab, folder: Path) -> Iterator[str]:
    names = [task.name for task in lab.tasks]
    if twice := [name for name in names if names.count(name) > 1]:
        yield f"two tasks are called '{twice[0]}'"
    runs = {task.name for task in lab.of_kind("run")}
    for task in lab.tasks:
        if task.kind in ("predict", "claim"):
            if task.figure not in FIGURES:
                yield f"{task.name}: figure='{task.figure}': there are {', '.join(FIGURES)}"
            if not task.of or (task.over and task.minus):
                yield f"{task.name}: say of which run ('of'), and at most one of 'over' and 'minus'"
            if strange := [name for name in task.runs if name not in runs]:
                yield f"{task.name}: there is no run '{strange[0]}'"
        if task.kind in CODE and not task.file.endswith(".py"):
            yield f"{task.name}: say which FILE.py the student completes ('file')"
        if task.kind == "loop" and task.speed:
            yield f"{task.name}: the speed of a loop cannot be graded ('speed')"
        if task.kind == "run":
            if naming := [key for key in task.free if key in NAMES_CODE]:
                yield f"{task.name}: free: '{naming[0]}' may name code, which grading would import"
            if strange := [key for key in task.free if not is_key(key)]:
                yield f"{task.name}: free: '{strange[0]}' is not a setting"
            yield from _own_code(lab, task, folder)


def _own_code(lab: Lab, task: Task, folder: Path) -> Iterator[str]:
    """Settings that name a file of the teacher's: it is on the disk of neither the student nor the process that computes a run again."""
    settings = dotted(*lab.settings(task))
    for key in NAMES_CODE:
        for name in filter(is_spec, map(str.strip, str(settings[key]).split(","))):
            where = name.rpartition(":")[0]
            module = where.partition(".")[0]
            if where.endswith(".py") or exists(folder / f"{module}.py") or exists(folder / module / "__init__.py"):
                yield (
                    f"{task.name}: {key}={name} names a file, which grading does not have: name what comes with Lockstep, "
                    f"or code of an installed package ({key}=package.module:name)"
                )


def digest(folder: Path) -> str:
    """The SHA-256 of a lab's lab.toml: two labs of one name may ask for different things."""
    return hashlib.sha256((folder / FILE).read_bytes()).hexdigest()


def builtin() -> list[Lab]:
    """The labs that come with Lockstep, by name."""
    return [read(path.parent) for path in sorted(BUILTIN.glob(f"*/{FILE}"))]


def is_builtin(name: str) -> bool:
    return "/" not in name and is_file(BUILTIN / name / FILE)


def find(name: str) -> Path:
    """The folder of a lab that somebody has named: one that comes with Lockstep, or a folder of the teacher's own."""
    own = Path(name)
    if is_builtin(name):
        if is_file(own / FILE) and digest(own) != digest(BUILTIN / name):
            raise InputError(
                f"lab '{name}' comes with Lockstep, and is a folder here, with another {FILE}: say ./{name} for the folder, "
                "or type this elsewhere for Lockstep's"
            )
        return BUILTIN / name
    if is_file(own / FILE):
        return own
    known = ", ".join(path.parent.name for path in sorted(BUILTIN.glob(f"*/{FILE}")))
    raise InputError(f"no lab '{name}': there are {known}; a lab of your own is a folder with a {FILE}")
