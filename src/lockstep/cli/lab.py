"""`lockstep lab`: labs for a class, from the tasks to the grades."""

from __future__ import annotations

import shlex
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lockstep.cli.options import SECONDS, Group, data_root_option, json_option
from lockstep.cli.output import check_output, console, next_step, note, print_json, print_table, styled, writing
from lockstep.errors import InputError, RunCancelled, RunFailed
from lockstep.text import file_part, some
from lockstep.units import counted

if TYPE_CHECKING:
    from lockstep.lab.folder import LabFolder
    from lockstep.lab.graded import Graded

COLOURS = {"right": "green", "wrong": "red", "missing": "red", "by hand": "yellow", "not settled": "yellow"}
EPILOG = """\b
Examples:
  lockstep lab list
  lockstep lab new devices                     a folder with tasks, starter files and a ledger
  lockstep lab predict speedup=1.6             before you measure
  lockstep lab run one
  lockstep lab hand-in --student "Ana Li"      one file
  lockstep lab check ana.lab.zip -o grades     a page for each student, a CSV, results.json

\b
docs/labs-students.md and docs/labs.md say more, to students and to teachers.
"""
folder_option = click.option(
    "--folder", type=click.Path(path_type=Path), default=Path(), show_default="this folder", help="The lab folder."
)


@click.group("lab", cls=Group, epilog=EPILOG)
def command() -> None:
    """Labs for a class: predict, measure, hand in, grade."""


@command.command("list", epilog="\b\nExamples:\n  lockstep lab list\n  lockstep lab list --json")
@json_option
def list_labs(as_json: bool) -> None:
    """List the labs that come with Lockstep."""
    import msgspec

    from lockstep.lab.definition import builtin

    labs = builtin()
    if as_json:
        print_json([msgspec.to_builtins(lab) for lab in labs])
        return
    rows = [[lab.name, lab.title, f"{sum(task.worth for task in lab.tasks):g}", f"{lab.minutes} min"] for lab in labs]
    print_table(["lab", "about", "points", "computing"], rows, right=(2, 3))
    next_step("lockstep lab new devices (make a folder with its tasks)")


@command.command(
    "new",
    epilog="\b\nExamples:\n  lockstep lab new devices\n  lockstep lab new own my-lab --student 'Ana Li'\n"
    "  lockstep lab new labs/mine           a lab of your own: a folder with a lab.toml",
)
@click.argument("name")
@click.argument("folder", type=click.Path(path_type=Path), required=False)
@click.option("--student", default="", help="Whose lab it is; can also be said when it is handed in.")
def new(name: str, folder: Path | None, student: str) -> None:
    """Make a lab folder: tasks, starter files, a place for answers, and a ledger."""
    from lockstep.lab.definition import CODE
    from lockstep.lab.folder import make

    made = make(name, folder or Path(Path(name).name), student)
    tasks = counted(len(made.lab.tasks), "task")
    click.echo(f"{made.path}: {made.lab.title}, {tasks}; README.md says what to do")
    go = f"cd {shlex.quote(str(made.path))} && "
    if first := made.lab.of_kind("predict"):
        next_step(f"{go}lockstep lab predict {' '.join(f'{task.name}=NUMBER' for task in first)}")
    elif runs := made.lab.of_kind("run"):
        next_step(f"{go}lockstep lab run {runs[0].name}")
    elif code := made.lab.of_kind(*CODE):
        next_step(f"{go}lockstep lab check . (when {code[0].file} is complete)")


@command.command("predict", epilog="\b\nExamples:\n  lockstep lab predict speedup=1.6 accuracy=0")
@click.argument("numbers", nargs=-1, required=True, metavar="TASK=NUMBER...")
@folder_option
def predict(numbers: tuple[str, ...], folder: Path) -> None:
    """Commit what you expect, before it is measured. It cannot be changed once a run of it was begun."""
    lab = _open(folder)
    found: dict[str, float] = {}
    for word in numbers:
        name, _, text = word.partition("=")
        try:
            found[name] = float(text)
        except ValueError:
            raise InputError(f"'{word}' is not TASK=NUMBER, for example speedup=1.6") from None
    lab.predict(found)
    for name, number in found.items():
        click.echo(f"{name}: {number:g} {lab.lab.task(name).unit}".rstrip())
    note(f"committed as {lab.chain.head[:16]}, the last of {counted(len(lab.chain.records), 'record')}")
    waiting = [task for task in lab.lab.of_kind("run") if not lab.chain.of("start", task.name)]
    if waiting:
        next_step(f"lockstep lab run {' '.join([waiting[0].name, *(f'{key}=…' for key in waiting[0].free)])}")


@command.command("run", epilog="\b\nExamples:\n  lockstep lab run one\n  lockstep lab run mine optimizer.lr=0.01")
@click.argument("task")
@click.argument("words", nargs=-1, metavar="[KEY=VALUE]...")
@folder_option
def run(task: str, words: tuple[str, ...], folder: Path) -> None:
    """Measure what a task asks for; where you predicted it, show both."""
    from lockstep.cli.show import print_run
    from lockstep.report.progress import ProgressLine

    lab = _open(folder)
    with ProgressLine() as progress:
        made = lab.measure(task, words, note, progress)
    print_run(made, ranks=False)
    _reveal(lab, task)
    waiting = [one for one in lab.lab.of_kind("run") if lab.run_of(one.name) is None]
    if waiting:
        next_step(f"lockstep lab run {' '.join([waiting[0].name, *(f'{key}=…' for key in waiting[0].free)])}")
    else:
        next_step("lockstep lab status (what is left to do)")


def _reveal(lab: LabFolder, run: str) -> None:
    from lockstep.lab.figures import shown

    for task in lab.lab.predictions_before(run):
        found, predicted = lab.revealed(task), lab.predicted(task.name)
        if found is not None and predicted is not None:
            console().print(
                styled((f"{task.name}: ", "bold"))
                + f"you predicted {shown(predicted, task.unit)}, and measured {shown(found, task.unit)}"
            )


@command.command("status", epilog="\b\nExamples:\n  lockstep lab status\n  lockstep lab status --folder devices")
@folder_option
@json_option
def status(folder: Path, as_json: bool) -> None:
    """Show what is done, what was predicted and measured, and what is left."""
    from lockstep.lab.definition import CODE
    from lockstep.lab.figures import shown
    from lockstep.lab.hand_in import missing

    lab = _open(folder)
    left, rows = missing(lab), []
    for task in lab.lab.tasks:
        told = "missing" if task.name in left else "there"
        if task.kind == "run" and task.name in left and lab.chain.of("run", task.name):
            told = "missing; run it again"
        if task.kind == "run" and (made := lab.run_of(task.name)):
            told = f"run {made.id}"
        if task.kind in CODE:
            told = f"complete {task.file}, then lockstep lab check ."
        if task.kind == "predict" and task.name not in left:
            predicted, found = lab.predicted(task.name), lab.revealed(task)
            told = f"predicted {shown(predicted or 0.0, task.unit)}"
            told += f", measured {shown(found, task.unit)}" if found is not None else ", not measured yet"
        if task.kind == "claim" and (found := lab.revealed(task)) is not None:
            told += f"; the records say {shown(found, task.unit)}"
        rows.append([task.name, task.kind, f"{task.worth:g}", told])
    if as_json:
        print_json([dict(zip(("task", "kind", "points", "state"), row, strict=True)) for row in rows])
        return
    print_table(["task", "kind", "points", ""], rows, right=(2,))
    next_step(f"lockstep lab check {shlex.quote(str(folder))} (what grading will say)" if not left else "")


@command.command(
    "hand-in", epilog="\b\nExamples:\n  lockstep lab hand-in --student 'Ana Li'\n  lockstep lab hand-in -o ana.lab.zip"
)
@folder_option
@click.option("--student", default="", help="Your name, if 'lab new' was not told.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The file to write (default: LAB-NAME.lab.zip).")
@json_option
def hand_in(folder: Path, student: str, output: Path | None, as_json: bool) -> None:
    """Make one file of runs, predictions, answers and code."""
    from dataclasses import asdict

    from lockstep.lab import hand_in as packing

    lab = _open(folder)
    who = student or lab.student
    safe = file_part(who.lower(), 60).strip("-")
    file = output or Path(f"{lab.lab.name}-{safe or 'student'}{packing.ENDING}")
    check_output(file, folder=False)
    with writing(file):
        packed = packing.hand_in(lab, file, who)
    if lab.student not in ("", who):
        note(f"warning: the ledger says that this is the lab of {lab.student}: your teacher will see both names")
    for name in packed.missing:
        note(f"warning: there is nothing for task '{name}'")
    if as_json:
        print_json(asdict(packed))
        return
    click.echo(f"{file}: lab {lab.lab.name} of {packed.student}, {packing.size_of(packed)}")
    next_step(f"lockstep lab check {shlex.quote(str(file))} (what your teacher will type)")


@command.command(
    "check",
    epilog="\b\nExamples:\n  lockstep lab check devices-ana.lab.zip\n  lockstep lab check ana.lab.zip ben.lab.zip -o grades\n"
    "  lockstep lab check --lab devices ana.lab.zip\n  lockstep lab check .          your own folder, before you hand in\n"
    "  lockstep lab check /autograder/submission --lab devices          a hand-in that was unpacked\n\n"
    "\b\nA student's code is run: this is no sandbox (docs/labs.md). Exit codes: 0 all right, 3 something is wrong or missing.",
)
@click.argument("submissions", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--lab",
    "name",
    help="Grade by this lab: a name, or a folder of your own. Unstated: Lockstep's lab that each says it is.",
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Write pages, class.csv and results.json into this folder."
)
@click.option(
    "--race", type=SECONDS, default="30s", help="How long the speed of a student's code is measured, for each file."
)
@click.option("--no-race", is_flag=True, help="Do not measure speed: nobody loses points for it.")
@data_root_option
@json_option
def check(
    submissions: tuple[Path, ...],
    name: str | None,
    output: Path | None,
    race: float,
    no_race: bool,
    data_root: str | None,
    as_json: bool,
) -> None:
    """Grade what was handed in, from its records: nothing that a student states is believed."""
    from lockstep.lab.copies import find_copies
    from lockstep.lab.given import check_there
    from lockstep.lab.pages import document, write

    check_there(submissions)
    if output:
        check_output(output, folder=True)
    everyone = _graded(submissions, name, data_root, 0.0 if no_race else race, one_line=not output)
    left = submissions[len(everyone) :]
    if not everyone:
        raise RunCancelled(_left(left, submissions))
    find_copies(everyone)
    if output:
        with writing(output):
            table = write(everyone, output)
    if as_json:
        print_json([document(graded) for graded in everyone])
    else:
        _print(everyone)
    if output:
        note(f"pages and results.json are in {output}; the class is in {table}")
    elif not as_json and not left:
        next_step(f"lockstep lab check {shlex.join(map(str, submissions[:3]))} -o grades (a page for each student)")
    if left:
        raise RunCancelled(_left(left, submissions))
    wrong = [graded for graded in everyone if not graded.right]
    if wrong:
        raise RunFailed(
            f"lab check: {counted(len(wrong), 'hand-in')} of {len(everyone)}: something is wrong or missing"
        )


def _graded(
    submissions: tuple[Path, ...], name: str | None, data_root: str | None, race_s: float, one_line: bool
) -> list[Graded]:
    """One after the other; Ctrl-C ends it with those that are graded by then. `one_line`: a single one that is no hand-in is an error."""
    from lockstep.lab import definition
    from lockstep.lab.given import graded_as_given
    from lockstep.lab.graded import ungradable
    from lockstep.report.progress import StatusLine

    lab = definition.read_template(definition.find(name)) if name else None
    everyone: list[Graded] = []
    with StatusLine() as line, suppress(KeyboardInterrupt):
        for path in submissions:
            try:
                everyone.append(graded_as_given(path, name, data_root, line.show, race_s))
            except Exception as error:
                if len(submissions) == 1 and one_line:
                    raise
                # What is not a hand-in has a page, and does not keep the others from their grades.
                everyone.append(ungradable(path, error, lab))
    return everyone


def _left(left: tuple[Path, ...], of: tuple[Path, ...]) -> str:
    are = "is" if len(left) == 1 else "are"
    return f"lab check: stopped: {len(left)} of {counted(len(of), 'hand-in')} {are} not graded: {some([path.name or str(path) for path in left])}"


def _open(folder: Path) -> LabFolder:
    from lockstep.lab.folder import LabFolder

    return LabFolder(folder)


def _print(everyone: list[Graded]) -> None:
    for graded in everyone:
        by_hand = f", {graded.by_hand:g} to give by hand" if graded.by_hand else ""
        console().print(
            styled((graded.student, "bold"), f", lab {graded.lab}: {graded.points:g} of {graded.of:g} points{by_hand}")
        )
        for flag in graded.flags:
            console().print(styled(("look at this: ", "red"), flag))
        print_table(
            ["task", "found", "points", "why"],
            [
                [
                    mark.task,
                    styled((mark.outcome, COLOURS[mark.outcome])),
                    f"{mark.points:g} of {mark.of:g}",
                    "; ".join(mark.lines),
                ]
                for mark in graded.marks
            ],
            right=(2,),
        )
        for text in graded.notes:
            note(text)
