"""`lockstep compare`: runs or studies beside each other, with intervals, verdicts, and what is unfair about it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from lockstep.cli.options import complete_run, json_option, runs_option
from lockstep.cli.output import console, next_step, place, print_json
from lockstep.errors import InputError
from lockstep.run import Run, runs_root

if TYPE_CHECKING:
    from lockstep.report.subject import Subject

EPILOG = """\b
Examples:
  lockstep compare batch-size                   a study, as far as it has come
  lockstep compare 20260101-12 20260101-13      runs, by the beginnings of their ids
  lockstep compare last                         the newest study; beside other names, the newest run
  lockstep compare last last~1                  the two newest runs
  lockstep compare runs/* --baseline ranks=1 --json

Runs that differ in nothing but the seed are repeats of one cell.
"""


@click.command("compare", epilog=EPILOG)
@click.argument("names", nargs=-1, required=True, metavar="RUN|STUDY...", shell_complete=complete_run)
@click.option(
    "--baseline", help="The cell that the others are compared with, by its name in the table (default: the first)."
)
@runs_option
@json_option
def command(names: tuple[str, ...], baseline: str | None, runs: Path | None, as_json: bool) -> None:
    """Compare runs, or the cells of a study."""
    from lockstep.report.subject import may_be_a_run, of_runs, of_study
    from lockstep.study.folder import StudyFolder

    # Beside other names 'last' is the newest run, as everywhere else.
    alone = len(names) == 1
    studies = [(name, StudyFolder.find(name, runs) if alone or name != "last" else None) for name in names]
    found = [study for _, study in studies if study]
    others = [name for name, study in studies if study is None]
    if found and (others or baseline):
        raise InputError(
            "compare: name either studies or runs; --baseline goes with runs (a study's file states its own)"
        )
    subjects = [of_study(study) for study in found]
    if not found:
        chosen = [run for name in others if may_be_a_run(name) for run in Run.find_all(name, runs_root(runs))]
        subjects = [of_runs(chosen, baseline, compared=True)]
    if as_json:
        documents = [subject.comparison for subject in subjects]
        print_json(documents[0] if len(documents) == 1 else documents)
        return
    for subject in subjects:
        print_comparison(subject, runs)


def print_comparison(subject: Subject, runs: Path | None, plot: bool = False) -> None:
    """The comparison's part of the report's document, without what `explain` and `report` are for."""
    from lockstep.report import answers, curves, speed, steps, terminal
    from lockstep.report.document import part

    terminal.draw(part(subject, (curves, speed, steps) if plot else (), details=False), console(), plot)
    told = answers.next_step(subject, place(runs), page=True)
    next_step(told, words=not told.startswith("lockstep "))
