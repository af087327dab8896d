"""A student who does everything right: solves any lab by the commands that its README names, in real processes."""

from __future__ import annotations

import shutil
from pathlib import Path

from lockstep.lab.definition import BUILTIN, CODE, find
from lockstep.lab.folder import ANSWERS, LabFolder
from support import Cli

# What tasks leave to the student.
CHOSEN = {
    "optimizer.lr": "0.01",
    "optimizer.momentum": "0.9",
    "optimizer.weight_decay": "0.001",
    "regularize.dropout": "0.2",
    "regularize.label_smoothing": "0.05",
}


def begin(cli: Cli, lab: str, student: str, folder: str) -> LabFolder:
    """A new lab folder with every prediction committed."""
    _must(cli, "lab", "new", lab, folder, "--student", student)
    made = LabFolder(cli.folder / folder)
    if predictions := made.lab.of_kind("predict"):
        _must(cli, "lab", "predict", *(f"{task.name}=1.5" for task in predictions), "--folder", folder)
    return made


def measure(cli: Cli, folder: str, *tasks: str, **environment: str) -> None:
    made = LabFolder(cli.folder / folder)
    for name in tasks or [task.name for task in made.lab.of_kind("run")]:
        chosen = [f"{key}={CHOSEN[key]}" for key in made.lab.task(name).free]
        _must(cli, "lab", "run", name, *chosen, "--folder", folder, **environment)


def answer(cli: Cli, folder: str, lab: str) -> None:
    """Claims as the records have them, some text for every answer, and the reference solutions."""
    made = LabFolder(cli.folder / folder)
    claims = {task.name: made.revealed(task) for task in made.lab.of_kind("claim")}
    lines = ["[claims]", *(f"{name} = {value}" for name, value in claims.items()), "", "[answers]"]
    lines += [f'{task.name} = "Since messages take time."' for task in made.lab.of_kind("answer")]
    (made.path / ANSWERS).write_text("\n".join(lines) + "\n")
    for task in made.lab.of_kind(*CODE):
        shutil.copyfile(find(lab) / f"reference_{task.file}", made.path / task.file)


def hand_in(cli: Cli, folder: str, output: str | None = None) -> Path:
    file = output or f"{folder}.lab.zip"
    _must(cli, "lab", "hand-in", "--folder", folder, "-o", file)
    return cli.folder / file


def solved(cli: Cli, lab: str, student: str, folder: str, **environment: str) -> Path:
    """The file that this student hands in."""
    begin(cli, lab, student, folder)
    measure(cli, folder, **environment)
    answer(cli, folder, lab)
    return hand_in(cli, folder)


def names() -> list[str]:
    return sorted(path.parent.name for path in BUILTIN.glob("*/lab.toml"))


def _must(cli: Cli, *words: str, **environment: str) -> None:
    result = cli(*words, timeout=600, **environment)
    assert result.returncode == 0, (words, result.stdout, result.stderr)
