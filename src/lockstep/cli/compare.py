"""`lockstep compare`: runs or studies beside each other, with intervals, verdicts, and what is unfair about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lockstep.cli.output import console, json_option, print_json, print_table, styled
from lockstep.cli.run import runs_option

EPILOG = """\b
Examples:
  lockstep compare batch-size                   a study, as far as it has come
  lockstep compare 20260101-12 20260101-13      runs, by the beginnings of their ids
  lockstep compare last                         the newest study
  lockstep compare runs/* --baseline ranks=1 --json

\b
Runs that differ in nothing but the seed are repeats of one cell.
"""


@click.command("compare", epilog=EPILOG)
@click.argument("names", nargs=-1, required=True, metavar="RUN|STUDY...")
@click.option(
    "--baseline", help="The cell that the others are compared with, by its name in the table (default: the first)."
)
@runs_option
@json_option
def command(names: tuple[str, ...], baseline: str | None, runs: Path | None, as_json: bool) -> None:
    """Compare runs, or the cells of a study."""
    from lockstep.errors import InputError
    from lockstep.run import runs_root
    from lockstep.study.compare import runs_document, study_document
    from lockstep.study.folder import StudyFolder
    from lockstep.study.gather import named

    studies = [(name, StudyFolder.find(name, runs)) for name in names]
    found = [study for _, study in studies if study]
    others = [name for name, study in studies if study is None]
    if found and (others or baseline):
        raise InputError(
            "compare: name either studies or runs; --baseline goes with runs (a study's file states its own)"
        )
    if found:
        documents = [study_document(study) for study in found]
    else:
        documents = [runs_document(named([name for name in others if _is_run(name)], runs_root(runs)), baseline)]
    if as_json:
        print_json(documents[0] if len(documents) == 1 else documents)
        return
    for document in documents:
        print_comparison(document)


def _is_run(name: str) -> bool:
    """`runs/*` also names the room of the studies and other folders, which are passed over."""
    from lockstep.reading import is_dir, is_file

    path = Path(name)
    return not is_dir(path) or is_file(path / "run.json")


def print_comparison(document: dict[str, Any]) -> None:
    """The table of cells, then everything that has to be said about it."""
    out = console()
    if document.get("study"):
        out.print(styled((document["study"], "bold"), f"  {document['about']}"), soft_wrap=True)
    _print_cells(document)
    _print_against(document)
    for cell in document["cells"]:
        if cell["left_out"]:
            out.print(styled(("left out", "yellow"), f"  '{cell['cell']}': {cell['left_out']}"), soft_wrap=True)
        for failure in cell["failed"]:
            out.print(styled(("failed", "red"), f"  '{cell['cell']}': {failure}"), soft_wrap=True)
    for text in document["fairness"]:
        out.print(styled(("note", "yellow"), f"  {text}"), soft_wrap=True)
    _print_stability(document, out)
    for published in document.get("published", []):
        _print_published(published, out)


def _print_cells(document: dict[str, Any]) -> None:
    from lockstep.study.measures import METRICS

    metrics = document["metrics"]
    labels = [METRICS[metric].title(document["target_accuracy"]) for metric in metrics]
    rows = []
    for cell in document["cells"]:
        columns = [_figure(cell["metrics"].get(metric), METRICS[metric].unit) for metric in metrics]
        rows.append(
            [
                cell["cell"],
                f"{cell['done']}/{cell['planned']}",
                *columns,
                _number(cell.get("speed_up"), "{:.2f}x"),
                _number(cell.get("efficiency"), "{:.0%}"),
            ]
        )
    print_table(["cell", "runs", *labels, "speed-up", "efficiency"], rows, right=range(1, len(labels) + 4))


def _figure(column: dict[str, Any] | None, unit: str) -> str:
    from lockstep.report.units import span

    if not column:
        return "–"
    missed = f" (reached in {column['n'] - column['missed']} of {column['n']})" if column["missed"] else ""
    return span(column["median"], column["low"], column["high"], unit) + missed


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def _print_against(document: dict[str, Any]) -> None:
    from lockstep.study.measures import METRICS

    rows = []
    for cell in document["cells"]:
        found = [
            (metric, column["against_baseline"])
            for metric, column in cell["metrics"].items()
            if "against_baseline" in column
        ]
        for metric, against in found:
            rows.append(
                [
                    cell["cell"],
                    METRICS[metric].title(document["target_accuracy"]),
                    str(against["n"]),
                    _effect(METRICS[metric].kind, against),
                    against["text"],
                ]
            )
    if rows:
        console().print(f"Against '{document['baseline']}', pair by pair; {document['family']}:", soft_wrap=True)
        print_table(["cell", "of", "pairs", "ratio or difference", "verdict"], rows, right=(2, 3))


def _effect(kind: str, against: dict[str, Any]) -> str:
    """Ratios as 1.03x, differences of accuracy in points."""
    if against["effect"] is None:
        return "–"

    def text(value: float) -> str:
        return f"{100 * value:+.2f}" if kind in ("accuracy", "loss") else f"{value:.3f}"

    unit = " points" if kind == "accuracy" else "" if kind == "loss" else "x"
    interval = "" if against["low"] is None else f" ({text(against['low'])} to {text(against['high'])})"
    return f"{text(against['effect'])}{unit}{interval}"


def _print_stability(document: dict[str, Any], out: Any) -> None:
    stability = document["stability"]
    spread = "" if stability["spread"] is None else f"; runs of one cell differ by {stability['spread']:.1%}"
    out.print(f"Machine: {stability['verdict']}{spread}.", soft_wrap=True)
    for text in stability["advice"]:
        out.print(f"  {text}", soft_wrap=True)
    overhead = document.get("overhead")
    if overhead:
        out.print(
            f"Beside training a run took {overhead['overhead_s']:.1f} s: {overhead['prepare_s']:.1f} s to check, {overhead['start_s']:.1f} s until the "
            f"first step, {overhead['finish_s']:.1f} s to end, {overhead['between_s']:.1f} s between runs (middle of {overhead['runs']:.0f}).",
            soft_wrap=True,
        )


def _print_published(published: dict[str, Any], out: Any) -> None:
    out.print(f"Published, {published['source']}:", soft_wrap=True)
    for cell, text in published["figures"].items():
        out.print(f"  {cell}: {text}", soft_wrap=True)
    colours = {"agrees": "green", "no difference seen": "green", "differs": "red"}
    for claim in published["claims"]:
        colour = colours.get(claim["verdict"], "yellow")
        figures = ""
        if claim["ours"] is not None:
            theirs = "" if claim["published_ratio"] is None else f"published {claim['published_ratio']:.2f}, "
            figures = f" ({theirs}ours {claim['ours']:.3g})"
        why = f"; {claim['why']}" if claim["why"] and claim["verdict"] in ("differs", "not settled") else ""
        out.print(styled("  ", (claim["verdict"], colour), f"  {claim['text']}{figures}{why}"), soft_wrap=True)
