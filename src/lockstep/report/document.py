"""One document for everything that shows runs: the page, text and pictures for papers, and whatever comes later."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from lockstep.measure.environment import version_of
from lockstep.measure.view import RunView
from lockstep.recipes import REPORTS
from lockstep.report import (
    answers,
    cells,
    curves,
    exchange,
    factors,
    findings,
    pace,
    run,
    setup,
    speed,
    spread,
    steps,
    timeline,
)
from lockstep.report.alone import ANSWER
from lockstep.report.subject import Subject
from lockstep.report.views import AnyChart, Part, Report, Said, Table
from lockstep.run import DAMAGED
from lockstep.units import counted, text


def report(subjects: Sequence[Subject]) -> Report:
    return of_parts([part(subject) for subject in subjects])


def of_parts(parts: list[Part]) -> Report:
    return Report(
        title=", ".join(each.name for each in parts),
        written=time.time(),
        lockstep=version_of("lockstep") or "unknown",
        parts=_with_own_ids(parts),
        definitions=findings.definitions(),
    )


ROOMS = (factors, curves, pace, speed, steps, spread, exchange, timeline)


def part(subject: Subject, rooms: Sequence[Any] = ROOMS, details: bool = True) -> Part:
    """`rooms`: whose charts are drawn. Without `details`: no findings of single runs, no settings, environment and commands."""
    charts: list[AnyChart] = [chart for room in rooms for chart in room.charts(subject)]
    differ, same = setup.settings(subject) if details else (None, None)
    alone = subject.groups[0].samples[0].run if subject.kind == "run" else None
    return Part(
        name=subject.name,
        kind=subject.kind,
        about=_about(subject.comparison),
        facts=run.facts(alone) if alone else cell_facts(subject),
        headlines=_headlines(subject),
        findings=findings.findings(subject) if details else [],
        notes=[*_damaged(subject), *(run.notes(alone) if alone else _notes(subject))],
        table=cells.table(subject),
        tables=[each for each in _tables(subject, alone) if each],
        published=cells.published(subject),
        charts=charts,
        settings=differ,
        same=same,
        environment=setup.environment(subject) if details else None,
        commands=setup.commands(subject) if details else [],
    )


def _about(document: dict[str, Any]) -> str:
    """What a study is about, and who the letters are that it speaks of."""
    about = str(document.get("about", ""))
    return f"{about.rstrip('.')}. {REPORTS}." if document.get("published") else about


def _headlines(subject: Subject) -> list[Said]:
    """The answers, and below the last sentence what to type next."""
    found = answers.answers(subject)
    last = max((place for place, said in enumerate(found) if said.question == ANSWER), default=None)
    if last is not None:
        found[last] = msgspec.structs.replace(found[last], next=answers.next_step(subject))
    return found


def _tables(subject: Subject, alone: RunView | None) -> list[Table | None]:
    return [run.epochs(alone), run.ranks(alone)] if alone else [cells.effects(subject)]


def _with_own_ids(parts: list[Part]) -> list[Part]:
    """Two parts have plots of the same kind; their files must not have the same name."""
    if len(parts) == 1:
        return parts
    return [
        msgspec.structs.replace(
            part, charts=[msgspec.structs.replace(chart, id=f"{number}-{chart.id}") for chart in part.charts]
        )
        for number, part in enumerate(parts, 1)
    ]


def cell_facts(subject: Subject) -> list[tuple[str, str]]:
    document = subject.comparison
    runs = subject.runs
    planned = document.get("runs_planned", len(runs))
    spec = subject.done[0].spec if subject.done else None
    stability = document["stability"]
    race = document.get("race")
    what = "starts" if race else "runs"
    spread = "" if stability["spread"] is None else f", {what} of one cell differ by {stability['spread']:.1%}"
    found = [
        ("cells", str(len(subject.groups))),
        ("time", _race_text(race) if race else "–"),
        ("trainings" if race else "runs done", f"{sum(run.state == 'done' for run in runs)} of {planned}"),
        ("baseline", document["baseline"] or "–"),
        ("model and data", f"{spec.recipe.model} on {spec.recipe.data}" if spec else "–"),
        ("accuracy that all reached", text(document["target_accuracy"], "percent")),
        ("machine", f"{stability['verdict']}{spread}"),
        ("what differs", setup.differences(subject) or "–"),
    ]
    return [(label, value) for label, value in found if value != "–"]


def _race_text(race: dict[str, Any]) -> str:
    over = "" if race["over"] else ", not over"
    return f"in turns, up to {counted(race['starts'], 'start')} of a cell, {counted(race['rounds'], 'round')}, {text(race['seconds'], 'seconds')}{over}"


def _when(check: dict[str, Any]) -> str:
    return "right before and after it" if check["beside"] else "in the race"


def _left_out(check: dict[str, Any]) -> str:
    """Of trainings that had not had their cores."""
    return f"; {counted(check['starved'], 'more training')} without all of the cores" if check.get("starved") else ""


def _damaged(subject: Subject) -> list[str]:
    """What cannot be read, and so is left out: runs as a whole, and files of those that are drawn."""
    whole = [text for group in subject.groups for text in group.unstarted]
    whole += [
        f"{each.run.id} is damaged: {each.cause}" for g in subject.groups for each in g.samples if each.state == DAMAGED
    ]
    drawn = [group.samples[0].run for group in subject.trained]
    return [*whole, *(f"{one.id} is damaged: {text}: left out" for one in drawn for text in one.rank_damage())]


def _notes(subject: Subject) -> list[str]:
    """What is unfair about a comparison, how steady the machine was, and what the study cost beside training."""
    document = subject.comparison
    found = [*document["fairness"], *document["stability"]["advice"]]
    if check := document.get("check"):
        found.append(
            f"a whole training takes as long as its steps and evaluations, as timed {_when(check)}, within {check['median']:.1%} (median of "
            f"{counted(check['n'], 'training')}, worst {check['worst']:.1%}){_left_out(check)}"
        )
    overhead = document.get("overhead")
    if overhead:
        found.append(
            f"beside training a run took {overhead['overhead_s']:.1f} s: {overhead['prepare_s']:.1f} s to check, {overhead['start_s']:.1f} s until "
            f"the first step, {overhead['finish_s']:.1f} s to end, {overhead['between_s']:.1f} s between runs (medians of {counted(int(overhead['runs']), 'run')})"
        )
    return found
