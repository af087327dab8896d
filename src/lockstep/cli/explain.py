"""`lockstep explain`: where the time went, why it is not N times faster, what to do next."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from lockstep.cli.options import complete_run, json_option, real, runs_option
from lockstep.cli.output import console, next_step, note, place, print_json

if TYPE_CHECKING:
    from lockstep.explain.asked import Explained

QUESTIONS = (
    "machine",
    "step",
    "speed-up",
    "overlap",
    "straggler",
    "limits",
    "outside",
    "script",
    "accuracy",
    "overfitting",
    "precision",
    "recommendation",
)


class Question(click.Choice[str]):
    """Ours, or one that another package's analyzer answers: what is installed is looked through only for a word that is not ours."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in self.choices:
            from lockstep.offered import names

            if value in names("analyzer"):
                return value
        return super().convert(value, param, ctx)


EPILOG = """\b
Examples:
  lockstep explain last                       the newest run, from what it recorded
  lockstep explain last --measure             … and from baselines and counterfactuals, measured now (about 20 s)
  lockstep explain last -q speed-up -q limits
  lockstep explain batch-size                 every cell of a study
  lockstep explain last --accuracy 0.99 --json

Findings come with the costliest first. docs/explain.md says how each number comes about.
"""


@click.command("explain", epilog=EPILOG)
@click.argument("name", default="last", metavar="RUN|STUDY", shell_complete=complete_run)
@click.option(
    "--measure",
    is_flag=True,
    help="Start the run's ranks again for a few seconds, to measure what its records cannot tell.",
)
@click.option(
    "-q",
    "--question",
    "questions",
    metavar="QUESTION",
    multiple=True,
    type=Question(QUESTIONS),
    help=f"Only this one; can be repeated: {', '.join(QUESTIONS)}.",
)
@click.option("--accuracy", "target", type=real(0, 1), help="The accuracy that the recommendation is for, 0 to 1.")
@click.option("--seconds", default=12.0, type=real(1, 600), help="How long to measure.")
@runs_option
@json_option
def command(
    name: str,
    measure: bool,
    questions: tuple[str, ...],
    target: float | None,
    seconds: float,
    runs: Path | None,
    as_json: bool,
) -> None:
    """Say where the time of a run or study went, and what to do next."""
    from lockstep.explain.asked import asked, measure_beside
    from lockstep.report.progress import ProbeLine

    found = asked(name, runs, note)
    if measure:
        for run in found.runs.values():
            with ProbeLine(f"measuring {run.id}", quiet=as_json) as line:
                measure_beside(run, seconds, note, line)
    explained = list(found.explained(questions, target))
    if as_json:
        documents = [_document(each) for each in explained]
        print_json(documents[0] if len(documents) == 1 else documents)
        return
    _print(explained, found.most)
    last = next((each for each in explained if not each.evidence.ways and _can_measure(each)), None)
    if found.study:
        next_step(f"lockstep report {found.study.name}{place(runs)} -o {found.study.name}.html (all of it as a page)")
    elif last and not measure:
        next_step(
            f"lockstep explain {last.evidence.run.id}{place(runs)} --measure (what its records cannot tell, in about 20 s)"
        )
    else:
        name = explained[0].evidence.run.id
        next_step(f"lockstep report {name}{place(runs)} (curves, and where every step goes, as a page)")


def _document(found: Explained) -> dict[str, Any]:
    from lockstep.explain import analyzers

    return {
        "run": found.evidence.run.id,
        "label": found.label,
        "plan": found.evidence.spec.plan.line(),
        "measured": bool(found.evidence.ways),
        "findings": [msgspec.to_builtins(each) for each in found.findings],
        "definitions": {each.name: each.definition for each in analyzers()},
    }


def _can_measure(found: Explained) -> bool:
    """Whether `--measure` could take its step apart."""
    spec = found.evidence.spec
    return not spec.options.own_loop and spec.placement.shares is None


def _print(explained: list[Explained], most: int | None) -> None:
    """What every cell shares is said once, before the cells."""
    from lockstep.report import terminal
    from lockstep.report.findings import said, shared
    from lockstep.report.run import ranks
    from lockstep.report.views import About

    out, lines = console(), {each.label: each.evidence.spec.plan.line() for each in explained}
    for about in shared([About(each.label, [said(one) for one in each.findings]) for each in explained]):
        terminal.hanging(out, (about.name, "bold"), lines.get(about.name, ""))
        has_step = any(each.question == "step" for each in about.findings)
        if most is None and has_step and (table := ranks(explained[0].evidence.run)):
            terminal.draw_table(table, out)
            out.print()
        terminal.draw_findings(about.findings[:most], out)
