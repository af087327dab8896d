"""`lockstep runs`: the list of runs; some of them by conditions, with tags, or deleted."""

from __future__ import annotations

import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lockstep import index
from lockstep.cli.options import complete_runs, json_option, runs_option
from lockstep.cli.output import console, next_step, note, place, print_json, print_table
from lockstep.errors import InputError
from lockstep.index import Row
from lockstep.run import Run, check_tag, delete, runs_root, size_of, sweep, why_kept, write_tags, writing
from lockstep.units import clock, counted, text

if TYPE_CHECKING:
    from lockstep.study.folder import StudyFolder

FIGURES = ("train_seconds", "images_per_second")
NEWEST = 20
# Ids that take more of the window's width than this have their figures below them.
LONG_IDS = 0.6

EPILOG = """\b
Examples:
  lockstep runs                                     the newest, a study's runs as one line
  lockstep runs --each                              … or a line for each of them
  lockstep runs batch-size                          the runs of a study
  lockstep runs optimizer.name=adam ranks=2 'accuracy>0.9'
  lockstep runs last --tag baseline                 then: lockstep show baseline, lockstep compare baseline last
  lockstep runs state=failed --delete               after a question; --yes asks none

A condition is KEY=VALUE, also with != > >= < <= (in quotes, for the shell). KEY is any key of a recipe or
a placement, a figure (accuracy, seconds, images_per_second, memory, test_loss, …), state, study, cell or tag.
"""


@click.command("runs", epilog=EPILOG)
@click.argument("words", nargs=-1, metavar="[RUN|STUDY|KEY=VALUE]...", shell_complete=complete_runs)
@runs_option
@click.option("--each", is_flag=True, help="A line for each run of a study, too.")
@click.option("--all", "everything", is_flag=True, help=f"All of them, not only the newest {NEWEST} lines.")
@click.option("--tag", metavar="NAME", help="Give these runs a name, which other commands take too.")
@click.option("--untag", metavar="NAME", help="Take a tag from these runs.")
@click.option("--delete", "deletes", is_flag=True, help="Delete these runs, after a question.")
@click.option("--yes", is_flag=True, help="With --delete: ask nothing.")
@json_option
def command(
    words: tuple[str, ...],
    runs: Path | None,
    each: bool,
    everything: bool,
    tag: str | None,
    untag: str | None,
    deletes: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """List the runs, newest last: all of them, or those that are named or fulfil conditions. Tag or delete these."""
    root = runs_root(runs)
    does = [
        option
        for option, given in (("--tag", tag is not None), ("--untag", untag is not None), ("--delete", deletes))
        if given
    ]
    if len(does) > 1:
        raise InputError(f"{does[0]} and {does[1]}: do one of them at a time")
    if does and not words:
        raise InputError(f"{does[0]}: say which runs, by name or by conditions: lockstep runs state=failed {does[0]} …")
    if yes and not deletes:
        raise InputError("--yes has no effect without --delete: leave it out")
    found = index.rows(root)
    if words:
        from lockstep.cli.conditions import chosen

        found = chosen(words, root, found)
        if not found:
            if as_json and not does:
                print_json(found)
            else:
                note(f"no run in {root} fits {' '.join(words)}")
            return
    if tag is not None or untag is not None:
        _tag(found, root, tag, untag, place(runs))
    elif deletes:
        if _delete(found, root, yes, as_json) and not as_json:
            next_step(f"lockstep runs{place(runs)} (lists what is left)")
    elif as_json:
        print_json(found)
    elif not found:
        note(f"no runs in {root}: start one with 'lockstep run', or name another folder with --runs")
    else:
        _print(found, each or bool(words), everything)
        _next(found, each or bool(words), place(runs))


# ---------------------------------------------------------------- the list


def _print(found: list[Row], each: bool, everything: bool) -> None:
    lines = [[row] for row in found] if each else _grouped(found)
    shown = lines if everything else lines[-NEWEST:]
    rows = [row for line in shown for row in line]
    from lockstep.metrics import RECORDED

    # What a regression has instead of an accuracy.
    other = any(row["test_accuracy"] is None and row["test_loss"] is not None for row in rows)
    figures = ("test_accuracy", *(["test_loss"] if other else []), *FIGURES)
    extra = [key for key in ("tags", "study") if any(row[key] for row in rows) and (each or key == "tags")]
    headers = ["id", "state", "ranks", "batch", "epochs", *(RECORDED[name].heading for name in figures), "age", *extra]
    table = [
        [
            line[0]["id"] if _alone(line, each) else f"study {line[0]['study']}: {counted(len(line), 'run')}",
            _states(line),
            *(_range(line, name) for name in ("ranks", "global_batch", "epochs")),
            *(RECORDED[name].text(line[0][name]) if _alone(line, each) else "" for name in figures),
            clock(max(0.0, time.time() - line[-1]["created"])),
            *(_names(line, key) for key in extra),
        ]
        for line in shown
    ]
    out = console()
    if max(len(row[0]) for row in table) > LONG_IDS * out.width:
        print_table(["id"], [[([row[0], _below(headers, row)], "")] for row in table], out=out)
    else:
        numbers = 6 + len(figures)
        spare = (*range(numbers, numbers + len(extra)), 4, 3, 2)
        print_table(headers, table, right=tuple(range(2, numbers)), spare=spare, out=out)
    if len(shown) < len(lines):
        note(f"the newest {len(shown)} of {len(lines)}; --all lists every one")


def _below(headers: list[str], row: list[str]) -> str:
    """The figures of a run as text, for a window that has no room for them beside its id, which has the name of its study."""
    told = [
        f"{text} {head}" if "/" in head else f"{head} {text}"
        for head, text in zip(headers[2:], row[2:], strict=True)
        if text not in ("", "–") and head != "study"
    ]
    return ", ".join([row[1], *told])


def _next(found: list[Row], each: bool, where: str) -> None:
    """How to go on with the newest run, and with the newest study that is one line."""
    study = "" if each else next((row["study"] for row in reversed(found) if row["study"]), "")
    told = [f"lockstep show {found[-1]['id']}{where} (its results, and where the time went)"]
    if study:
        told += [
            f"lockstep study show {study}{where} (compares its runs)",
            f"lockstep runs {study}{where} (lists them)",
        ]
    newest_is_its = study and study == found[-1]["study"]
    next_step("; ".join(told[1:] if newest_is_its else told))


def _grouped(found: list[Row]) -> list[list[Row]]:
    """Runs as lines: one for all runs of a study, where its newest one stands."""
    lines: dict[tuple[str, str], list[Row]] = {}
    for row in found:
        key = ("study", row["study"]) if row["study"] else ("run", row["id"])
        lines[key] = [*lines.pop(key, []), row]
    return list(lines.values())


def _alone(line: list[Row], each: bool) -> bool:
    return each or not line[0]["study"]


def _states(line: list[Row]) -> str:
    if len(line) == 1:
        return str(line[0]["state"])
    counts = Counter(row["state"] for row in line)
    return next(iter(counts)) if len(counts) == 1 else ", ".join(f"{n} {state}" for state, n in counts.most_common())


def _range(line: list[Row], key: str) -> str:
    values = sorted({row[key] for row in line if row[key] is not None})
    return "–" if not values else str(values[0]) if len(values) == 1 else f"{values[0]}…{values[-1]}"


def _names(line: list[Row], key: str) -> str:
    return ", ".join(
        dict.fromkeys(name for row in line for name in (row["tags"] if key == "tags" else [row[key] or ""]))
    )


# ---------------------------------------------------------------- tags


def _tag(found: list[Row], root: Path, tag: str | None, untag: str | None, where: str) -> None:
    if tag is not None:
        from lockstep.study.folder import list_studies

        check_tag(tag)
        if any(study.name == tag for study in list_studies(root)) or Run(root / tag).folder.is_dir():
            raise InputError(f"--tag {tag}: a run or a study is called that already: choose another")
    for row in found:
        run = Run(root / row["id"])
        with writing(run.folder):
            write_tags(run.folder, [*run.tags, tag] if tag else [name for name in run.tags if name != untag])
    what = counted(len(found), "run")
    note(f"{what} tagged {tag}" if tag else f"{what} without the tag {untag}")
    if tag:
        next_step(f"lockstep {'show' if len(found) == 1 else 'runs'} {tag}{where}")
    else:
        next_step(f"lockstep runs{where} (lists what is there)")


# ---------------------------------------------------------------- deleting


def _delete(found: list[Row], root: Path, yes: bool, as_json: bool) -> bool:
    """Whether any were."""
    if not yes and (as_json or not sys.stdin.isatty()):
        raise InputError("--delete asks, and nobody can answer here: add --yes")
    going: list[Run] = []
    for run in (Run(root / row["id"]) for row in found):
        if why := why_kept(run, root):
            note(f"{run.id} stays: {why}")
        else:
            going.append(run)
    if not going:
        raise InputError("--delete: nothing is deleted")
    names = {run.id for run in going}
    if not yes:
        _print([row for row in found if row["id"] in names], each=True, everything=True)
    concerned = _concerned(names, root)
    for study, count in concerned:
        note(
            f"study '{study.name}' loses {counted(count, 'run')}: 'lockstep study run {study.name}' would train anew, "
            f"'lockstep study pack {study.name}' keeps it as it is"
        )
    what = f"{counted(len(going), 'run')}, {text(sum(size_of(run.folder) for run in going), 'bytes')}"
    if not yes and not click.confirm(f"Delete {what}, for good?", err=True):
        note("nothing is deleted")
        return False
    with ExitStack() as stack:
        for study, _ in concerned:  # one that is being run may be about to read them
            stack.enter_context(study.held())
        sweep(root)
        for run in going:
            delete(run, root)
    if as_json:
        print_json({"deleted": [run.id for run in going]})
    note(f"deleted {what}")
    return True


def _concerned(names: set[str], root: Path) -> list[tuple[StudyFolder, int]]:
    """The studies that have started these runs, each with how many."""
    from lockstep.reading import Damaged
    from lockstep.study.folder import list_studies

    found = []
    for study in list_studies(root):
        try:
            own = {name for started in study.started().values() for name in started}
        except Damaged as error:
            note(f"whether these are runs of study '{study.name}' is not known: {error}")
            continue
        if count := len(own & names):
            found.append((study, count))
    return found
