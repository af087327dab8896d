"""`lockstep study`: run, list and show studies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lockstep.cli.copying import copy
from lockstep.cli.options import Group, complete_key, data_root_option, json_option, plot_option, runs_option, whole
from lockstep.cli.output import console, next_step, note, place, print_json, print_records, print_table
from lockstep.cli.packing import pack, unpack
from lockstep.cli.plan import without_dry_run
from lockstep.errors import DataError, InputError, RunFailed
from lockstep.reading import Damaged
from lockstep.recipes import REPORTS
from lockstep.run import Options, runs_root
from lockstep.units import clock, counted

if TYPE_CHECKING:
    from lockstep.study.definition import Study
    from lockstep.study.folder import StudyFolder
    from lockstep.study.plan import Planned
    from lockstep.turns import Race

EPILOG = """\b
Examples:
  lockstep study list
  lockstep study run batch-size --quick
  lockstep study run mine.toml --dry-run
  lockstep study run launchers data=embedded --repeats 10
  lockstep study run published                  all published experiments, overnight
  lockstep study show batch-size
  lockstep study copy batch-size -o mine.toml    a file of your own, to change it
  lockstep study pack batch-size                 one file, to read elsewhere

A study that was stopped or killed goes on where it was with the same command.
docs/studies.md says how to write one.
"""


@click.group("study", cls=Group, epilog=EPILOG)
def command() -> None:
    """Vary factors over a recipe and a placement: times from turns, accuracies from trainings, and what differs."""


@command.command(
    "run",
    epilog="\b\nExamples:\n  lockstep study run batch-size --quick\n  lockstep study run mine.toml train_limit=6000 --dry-run",
)
@click.argument("name", metavar="FILE|NAME")
@click.argument("words", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=complete_key)
@click.option("--quick", is_flag=True, help="The study's own small version: minutes on two cores.")
@click.option("--repeats", type=whole(1, 10_000), help="Seeds of every recipe; more of them go on where the study was.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Show the plan and how long it takes, and train nothing. Data that is not here is fetched: the plan needs its size.",
)
@click.option("--retry-failed", "again", is_flag=True, help="Run again what failed.")
@runs_option
@data_root_option
@click.option("--quiet", is_flag=True, help="No progress.")
@json_option
def run_(
    name: str,
    words: tuple[str, ...],
    quick: bool,
    repeats: int | None,
    dry_run: bool,
    again: bool,
    runs: Path | None,
    data_root: str | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Run a study file, a built-in study, or 'published' for all of them."""
    from lockstep.study import builtin
    from lockstep.study.file import with_words
    from lockstep.study.folder import StudyFolder

    options = Options(data_root=data_root, save_model=False)
    found = [
        (with_words(study, words, quick, repeats), StudyFolder.of(study.name, runs, quick, words))
        for study in builtin.find(name)
    ]
    documents: list[dict[str, Any]] = []
    problems = []
    for study, folder in found:
        try:
            documents.append(
                _dry(study, folder, options, as_json)
                if dry_run
                else _run(study, folder, options, runs, again, quiet, as_json)
            )
        except (InputError, DataError, RunFailed) as error:
            if len(found) == 1:
                raise
            # Of many studies overnight, one that cannot run must not keep the others from running.
            problems.append(f"{study.name}: {error}")
            note(f"study '{folder.name}' did not run: {error}")
    if as_json:
        print_json(documents[0] if len(found) == 1 else documents)
    if problems:
        raise RunFailed(f"{len(problems)} of {len(found)} studies did not run: {'; '.join(problems)}")


def _run(
    study: Study, folder: StudyFolder, options: Any, runs: Path | None, again: bool, quiet: bool, as_json: bool
) -> dict[str, Any]:
    from lockstep.cli.compare import print_comparison
    from lockstep.report.subject import of_study
    from lockstep.study import execute
    from lockstep.study.plan import plan

    planned = plan(study, options, folder.runs)
    watcher = _watcher(quiet)
    for cell in planned.cells:
        if cell.left_out:
            watcher.says(f"cell '{cell.name}' is left out: {cell.left_out}")
    watcher.says(f"study '{folder.name}': {_size(planned)}")
    counts = execute.run(folder, planned, options, again, watcher)
    subject = of_study(folder)
    if not as_json:
        print_comparison(subject, runs)
    if not counts["done"] and counts["failed"]:
        raise RunFailed(f"study '{folder.name}': every run failed; 'lockstep study show {folder.name}' says why")
    return {**subject.comparison, **counts}


def _size(planned: Planned) -> str:
    """The two parts of a study: what races, and what is trained."""
    from lockstep.study.racing import budget_of, racing

    race = racing(planned)
    time = f"{counted(len(race), 'cell')} race for up to {clock(budget_of(planned))}; " if race else ""
    recipes = len({item.cell for item in planned.items})
    seeds = min(planned.study.repeats, 1 + max(item.repeat for item in planned.items))
    most = 1 + max(item.repeat for item in planned.items)
    more = f", up to {most} where that does not settle it" if most > seeds else ""
    return f"{time}{counted(recipes, 'recipe')} to train with {counted(seeds, 'seed')}{more}"


def _dry(study: Study, folder: StudyFolder, options: Any, as_json: bool) -> dict[str, Any]:
    """The plan: every cell, what is trained, and the time."""
    from lockstep.study import estimate, racing, timing
    from lockstep.study.plan import outcome, plan

    planned = plan(study, options, folder.runs)
    there = folder.runs_of(planned.items)
    first = [item for item in planned.items if item.repeat < study.repeats]
    todo = [item for item in first if outcome(there.get(item.digest)) == "to do"]
    raced = timing.read(folder, planned)
    known = [time for cell in planned.cells if raced and (time := raced.of(cell))]
    cells = estimate.of_cells(planned, folder.records(), folder.runs, {time.cell.name: time.cost for time in known})
    race_s = racing.budget_of(planned) if racing.racing(planned) and not (raced and raced.state.over) else 0.0
    seconds = race_s + estimate.left(todo, cells)
    document = {
        "study": folder.name,
        "cells": [
            {
                "cell": cell.name,
                "plan": cell.plan.line() if cell.plan else None,
                "left_out": cell.left_out,
                "seconds": cells[cell.name].seconds if cell.plan else None,
                "basis": cells[cell.name].basis if cell.plan else None,
            }
            for cell in planned.cells
        ],
        "trainings": [{"cell": item.cell, "repeat": item.repeat, "seed": item.seed} for item in first],
        "race_seconds": race_s,
        "runs": len(first),
        "to_do": len(todo),
        "seconds": seconds,
    }
    if not as_json:
        _print_plan(planned, document)
    return document


def _print_plan(planned: Planned, document: dict[str, Any]) -> None:
    rows = [
        {
            "cell": cell["cell"],
            "plan": cell["plan"] or f"left out: {cell['left_out']}",
            "a training": clock(cell["seconds"]) if cell["plan"] else "–",
            "by": cell["basis"] or "–",
        }
        for cell in document["cells"]
    ]
    print_records(rows, right=(2,), spare=(3, 2))
    out = console()
    out.print(
        f"{_size(planned)}: {document['to_do']} of {counted(document['runs'], 'training')} to do, about {clock(document['seconds'])}"
    )
    if planned.study.budget_minutes:
        out.print(f"it stops after budget_minutes={planned.study.budget_minutes:g}")
    context = click.get_current_context()
    next_step(without_dry_run(context, [context.params["name"], *context.params["words"]]))


@command.command("list", epilog="\b\nExamples:\n  lockstep study list\n  lockstep study list --json")
@runs_option
@json_option
def list_(runs: Path | None, as_json: bool) -> None:
    """List the built-in studies, and those that were begun here."""
    from lockstep.study import builtin
    from lockstep.study.folder import list_studies
    from lockstep.study.plan import outcome

    rows = []

    def add(study: str, kind: str, cells: int | None, runs: str, about: str, source: str = "") -> None:
        rows.append({"study": study, "kind": kind, "cells": cells, "runs": runs, "from": source, "about": about})

    for name in builtin.names():
        study = builtin.find(name)[0]
        sources = ", ".join(dict.fromkeys(published.source.partition(":")[0] for published in study.published))
        cells = len(study.all_cells())
        add(name, "built-in", cells, counted(study.repeats, "seed"), study.about, sources)
    for folder in list_studies(runs):
        try:
            planned = folder.read()
            there = folder.runs_of(planned.items)
        except Damaged as error:
            add(folder.name, "begun", None, "damaged", str(error))
            continue
        expected = planned.expected(there)
        done = sum(outcome(there.get(item.digest)) == "done" for item in expected)
        add(folder.name, "begun", len(planned.cells), f"{done}/{len(expected)} done", planned.study.about)
    if as_json:
        print_json(rows)
        return
    print_table(["study", "cells", "runs", "from", "about"], _lines(rows), right=(1,), spare=(1, 3, 2))
    note(f"{REPORTS}.")
    begun = [row["study"] for row in rows if row["kind"] == "begun"]
    shown = f"; lockstep study show {begun[-1]}{place(runs)} (what it found)" if begun else ""
    next_step(f"lockstep study run batch-size --quick{place(runs)} (a few minutes){shown}")


def _lines(rows: list[dict[str, Any]]) -> list[list[str | tuple[list[str], str]]]:
    """One for each study, of what it is about the first sentence ('study show' has the rest); below its name how far it has come here."""
    begun = {row["study"]: row["runs"] for row in rows if row["kind"] == "begun"}
    found = {row["study"]: row for row in reversed(rows)}  # what is built in says more of it
    lines: list[list[str | tuple[list[str], str]]] = []
    for name in dict.fromkeys(row["study"] for row in rows):
        row = found[name]
        runs = "" if row["kind"] == "begun" else row["runs"]
        cells = "–" if row["cells"] is None else str(row["cells"])
        head = [name, begun[name]] if name in begun else [name]
        lines.append([(head, ""), cells, runs, row["from"], row["about"].partition(". ")[0].rstrip(".")])
    return lines


@command.command("show", epilog="\b\nExamples:\n  lockstep study show batch-size\n  lockstep study show last --json")
@click.argument("name")
@runs_option
@plot_option
@json_option
def show(name: str, runs: Path | None, plot: bool, as_json: bool) -> None:
    """Show a study as far as it has come: by name, by folder, or 'last'."""
    from lockstep.cli.compare import print_comparison
    from lockstep.report.subject import of_study
    from lockstep.study.folder import StudyFolder

    found = StudyFolder.find(name, runs)
    if found is None:
        raise InputError(
            f"no study '{name}' in {runs_root(runs)}: 'lockstep study list' lists them, 'lockstep study run' starts one"
        )
    subject = of_study(found)
    if as_json:
        print_json(subject.comparison)
    else:
        print_comparison(subject, runs, plot)


def _watcher(quiet: bool) -> Any:
    """Shows the study's progress on stderr: one line a run, and the run's own line below it."""
    from lockstep.report.progress import ProgressLine
    from lockstep.study.session import Step, Watcher

    class Shown(Watcher):
        def __init__(self) -> None:
            self._line: ProgressLine | None = None
            self._starts = 0

        def begins(self, step: Step) -> ProgressLine:
            left = f", {clock(step.left_seconds)} left" if step.left_seconds else ""
            self._line = ProgressLine(f"[{step.number}/{step.total}{left}] {step.place}, seed {step.item.seed}")
            return self._line

        def raced(self, race: Race) -> None:
            if race.starts > self._starts:
                self._starts = race.starts
                found = race.ratios()
                settled = sum(ratio.verdict != "not settled" for ratio in found)
                note(
                    f"[race, {clock(race.elapsed)} of {clock(race.budget.seconds)}] {counted(race.starts, 'start')}: "
                    f"{settled} of {counted(len(found), 'comparison')} settled"
                )

        def ended(self, step: Step, record: dict[str, Any]) -> None:
            if self._line:
                self._line.clear()
            took = clock(record["ended"] - record["began"])
            how = f"failed: {record['cause']}" if record["state"] == "failed" else f"done in {took}"
            note(f"[{step.number}/{step.total}] {step.place}, seed {step.item.seed}: {how}")

        def says(self, text: str) -> None:
            note(text)

    return Watcher() if quiet else Shown()


command.add_command(copy)
command.add_command(pack)
command.add_command(unpack)
