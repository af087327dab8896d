"""`lockstep explain`: where the time went, why it is not N times faster, what to do next."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from lockstep.cli.options import json_option, real, runs_option
from lockstep.cli.output import console, note, print_json, styled

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

EPILOG = """\b
Examples:
  lockstep explain last                       the newest run, from what it recorded
  lockstep explain last --measure             … and from baselines and counterfactuals, measured now (about 20 s)
  lockstep explain last -q speed-up -q limits
  lockstep explain batch-size                 every cell of a study
  lockstep explain last --accuracy 0.99 --json

\b
Findings come with the costliest first. docs/explain.md says how each number comes about.
"""


@click.command("explain", epilog=EPILOG)
@click.argument("name", default="last", metavar="RUN|STUDY")
@click.option(
    "--measure",
    is_flag=True,
    help="Start the run's ranks again for a few seconds, to measure what its records cannot tell.",
)
@click.option(
    "-q", "--question", "questions", multiple=True, type=click.Choice(QUESTIONS), help="Only this one; can be repeated."
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
    for each in explained:
        _print(each, found.most)


def _document(found: Explained) -> dict[str, Any]:
    from lockstep.explain import ANALYZERS

    return {
        "run": found.evidence.run.id,
        "label": found.label,
        "plan": found.evidence.spec.plan.line(),
        "measured": bool(found.evidence.ways),
        "findings": [msgspec.to_builtins(each) for each in found.findings],
        "definitions": {each.name: each.definition for each in ANALYZERS},
    }


def _print(found: Explained, most: int | None) -> None:
    from lockstep.report import terminal
    from lockstep.report.findings import said
    from lockstep.report.run import ranks

    out = console()
    out.print(styled((found.label, "bold"), f"  {found.evidence.spec.plan.line()}"), soft_wrap=True)
    has_step = any(each.question == "step" for each in found.findings)
    if most is None and has_step and (table := ranks(found.evidence.run)):
        terminal.draw_table(table, out)
        out.print()
    terminal.draw_findings([said(each) for each in found.findings[:most]], out)
