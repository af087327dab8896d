"""What a student gets to read: the lab's own introduction, and its tasks with the commands, made from lab.toml so that the two agree."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.lab.definition import CODE, Lab, Task
from lockstep.units import counted


def student_page(lab: Lab, introduction: str) -> str:
    """README.md of a lab folder."""
    total = sum(task.worth for task in lab.tasks)
    head = [f"# {lab.title}", "", lab.about, "", introduction.strip(), ""]
    tasks = [f"## What to do ({total:g} points, about {lab.minutes} minutes of computing)", ""]
    return "\n".join([*head, *tasks, *_steps(lab)]) + "\n"


def _steps(lab: Lab) -> Iterator[str]:
    number = 0
    for title, kinds in (
        ("Predict, before you measure", ("predict",)),
        ("Measure", ("run",)),
        ("Write", CODE),
        ("Say what you found, in `answers.toml`", ("claim", "answer")),
    ):
        found = lab.of_kind(*kinds)
        if not found:
            continue
        number += 1
        yield f"### {number}. {title}"
        yield ""
        for task in found:
            yield from _task(task)
        if kinds == ("predict",):
            yield "    lockstep lab predict " + " ".join(f"{task.name}=NUMBER" for task in found)
            yield ""
            yield "A prediction earns its points by being made before the measurement, not by being right. It cannot be"
            yield "changed once one of its runs was begun."
            yield ""
        if kinds == CODE:
            yield "    lockstep lab check ."
            yield ""
            yield "says of your folder what the grading will say."
            yield ""
    yield f"### {number + 1}. Hand in"
    yield ""
    yield '    lockstep lab hand-in --student "YOUR NAME"'


def _task(task: Task) -> Iterator[str]:
    yield f"- **{task.name}** ({counted_points(task)}): {task.about}"
    if task.kind in ("predict", "claim"):
        yield f"  The figure: {task.asks()}{_unit(task)}."
    if task.kind in CODE:
        yield f"  Complete `{task.file}`."
        if task.speed:
            yield f"  Right first; then it should be at least {task.speed:g} times as fast as the reference solution."
    yield ""
    if task.kind == "run":
        yield f"      lockstep lab run {' '.join([task.name, *(f'{key}=…' for key in task.free)])}"
        yield ""


def _unit(task: Task) -> str:
    unit = task.unit
    return f", in {unit}" if unit and unit != "times" else ""


def counted_points(task: Task) -> str:
    whole = counted(int(task.points), "point") if task.points == int(task.points) else f"{task.points:g} points"
    return f"{whole}, and {task.speed_points:g} for speed" if task.speed_points else whole


def answers_template(lab: Lab) -> str:
    """answers.toml, with a commented line for every number and an empty text for every answer."""
    lines = [
        f"# What you found in lab '{lab.name}'. Take the # away from a claim and write your number.",
        "",
        "[claims]",
    ]
    for task in lab.of_kind("claim"):
        unit = "" if task.over else task.unit
        lines.append(f"# {task.name} = 0.0    # {task.asks()}{', in ' + unit if unit else ''}")
    lines += ["", "[answers]"]
    for task in lab.of_kind("answer"):
        lines += [f"# {line}" for line in task.about.splitlines()]
        lines.append(f'{task.name} = """\n"""')
    return "\n".join(lines) + "\n"
