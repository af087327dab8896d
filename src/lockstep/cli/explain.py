"""`lockstep explain`: where the time went, why it is not N times faster, what to do next."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from lockstep.cli.options import json_option, real, runs_option
from lockstep.cli.output import console, note, print_json, styled
from lockstep.errors import InputError
from lockstep.reading import Damaged
from lockstep.run import DAMAGED, Probe, Run, runs_root

if TYPE_CHECKING:
    from lockstep.explain.evidence import Evidence
    from lockstep.explain.finding import Finding
    from lockstep.measure.view import RunView
    from lockstep.study.gather import Group

QUESTIONS = (
    "step",
    "speed-up",
    "overlap",
    "straggler",
    "limits",
    "outside",
    "accuracy",
    "overfitting",
    "precision",
    "recommendation",
)
# Of a study's cells only what costs most is said.
MOST_PER_CELL = 3

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
    from lockstep.explain.evidence import Evidence, same_task, study_of
    from lockstep.study.folder import StudyFolder

    root = runs_root(runs)
    study = None if name == "last" else StudyFolder.find(name, runs)
    if study:
        chosen, peers, cells = _of_study(study)
    else:
        run = Run.find(name, root)
        chosen, peers, cells = {run.id: run}, same_task(run), study_of(run)
    for run in chosen.values():
        _check_ended(run)  # before anything is measured: a probe would disturb a run that is under way
    documents = []
    for label, run in chosen.items():
        if measure:
            _measure(run, seconds, as_json)
        documents.append(_document(label, Evidence(run, peers, target, cells), questions))
    if as_json:
        print_json(documents[0] if len(documents) == 1 else documents)
        return
    for document, run in zip(documents, chosen.values(), strict=True):
        _print(document, run, most=MOST_PER_CELL if study else None)


def _of_study(study: Any) -> tuple[dict[str, Run], list[RunView], list[Group]]:
    """One finished run of each cell, by the cell's name; all of the study's runs; and all of its cells."""
    from lockstep.study.gather import of_study

    cells = of_study(study, study.read())
    groups = [group for group in cells if any(each.own for each in group.done)]
    if not groups:
        raise InputError(f"study '{study.name}' has no finished run yet: lockstep study run {study.name}")
    runs = [each.run for group in groups for each in group.done if each.own]
    first: dict[str, Run] = {}
    for group in groups:
        whole = [each.run for each in group.done if each.own and not each.run.rank_damage()]
        if whole:
            first[group.name] = whole[0]
        else:
            own = next(each.run for each in group.done if each.own)
            note(f"cell '{group.name}' is left out: its run {own.id} is damaged: {own.rank_damage()[0]}")
    return first, runs, cells


def _check_ended(run: Run) -> None:

    status = run.status()
    if status["state"] == DAMAGED:
        raise Damaged(f"{run.id} is damaged and cannot be explained: {status['cause']}")
    if status["state"] != "done":
        raise InputError(
            f"{run.id} is {status['state']}: only a run that has ended well can be explained ('lockstep show' says more)"
        )


def _measure(run: Run, seconds: float, quiet: bool) -> None:
    import shutil

    from lockstep.cli.progress import ProbeLine
    from lockstep.probe import measure
    from lockstep.ways import BESIDE

    spec = run.spec()
    if spec.options.own_loop:
        raise InputError(
            f"--measure: {run.id} is a training loop of your own, which only your script can take apart: leave --measure out"
        )
    if spec.placement.shares is not None:
        raise InputError(
            f"--measure: the ranks of {run.id} have unequal shares, which cannot be taken apart: leave --measure out"
        )
    if spec.placement.launcher == "slurm":
        note("measuring as a Slurm job of its own")
    folder = run.folder / BESIDE
    shutil.rmtree(folder, ignore_errors=True)
    with ProbeLine(f"measuring {run.id}", quiet) as line:
        measure(spec.recipe, spec.placement, folder, Probe(seconds=seconds), spec.options.data_root, line)


def _document(label: str, evidence: Evidence, questions: tuple[str, ...]) -> dict[str, Any]:
    from lockstep.explain import ANALYZERS, explain

    run = evidence.run
    if damaged := run.rank_damage():
        raise Damaged(f"{run.id} is damaged and cannot be explained: {'; '.join(damaged)}")
    found: list[Finding] = explain(evidence, questions)
    return {
        "run": run.id,
        "label": label,
        "plan": evidence.spec.plan.line(),
        "measured": bool(evidence.ways),
        "findings": [msgspec.to_builtins(each) for each in found],
        "definitions": {each.name: each.definition for each in ANALYZERS},
    }


def _print(document: dict[str, Any], run: Run, most: int | None) -> None:
    from lockstep.measure.view import view
    from lockstep.report import terminal
    from lockstep.report.run import ranks
    from lockstep.report.views import Said

    out = console()
    out.print(styled((document["label"], "bold"), f"  {document['plan']}"), soft_wrap=True)
    table = (
        ranks(view(run)) if most is None and any(each["question"] == "step" for each in document["findings"]) else None
    )
    if table:
        terminal.draw_table(table, out)
        out.print()
    terminal.draw_findings(msgspec.convert(document["findings"][:most], list[Said]), out)
