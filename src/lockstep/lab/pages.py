"""What a grading leaves: a page for each student, a CSV for the class, and the results.json that Gradescope takes."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from lockstep.files import write_atomically
from lockstep.lab.graded import Graded, Mark
from lockstep.text import file_part, listed

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: #1b1f24; background: #fff;
  overflow-wrap: anywhere }
th, td:nth-child(2) { overflow-wrap: normal }
table { border-collapse: collapse; width: 100% } th, td { text-align: left; vertical-align: top; padding: .4rem .6rem; border-bottom: 1px solid #d0d7de }
td:nth-child(3) { white-space: nowrap; text-align: right } p.flag { border-left: .3rem solid #cf222e; padding-left: .6rem }
.right { color: #116329 } .wrong, .missing { color: #a40e26 } .hand, .open { color: #7d4e00 } pre { white-space: pre-wrap; font: inherit; margin: 0 }
@media (prefers-color-scheme: dark) { body { color: #e6edf3; background: #0d1117 } th, td { border-color: #30363d } .right { color: #3fb950 }
.wrong, .missing { color: #ff7b72 } .hand, .open { color: #d29922 } }
"""
CLASSES = {"by hand": "hand", "not settled": "open"}


def page(graded: Graded) -> str:
    """One student's page, with nothing to load from elsewhere."""
    title = f"{graded.student}: {graded.title or graded.lab}"
    by_hand = f", and {graded.by_hand:g} points to be given by hand" if graded.by_hand else ""
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'><title>{escape(title)}</title>",
        f"<style>{STYLE}</style><h1>{escape(title)}</h1>",
        f"<p><strong>{graded.points:g} of {graded.of:g} points</strong>{by_hand}. {escape(graded.file_name)}</p>",
        *(f"<p class=flag>{escape(flag)}</p>" for flag in graded.flags),
        "<table><tr><th>task<th>found<th>points<th>why</tr>",
        *(_row(mark) for mark in graded.marks),
        "</table>",
    ]
    if graded.notes:
        parts += ["<h2>Beside that</h2><ul>", *(f"<li>{escape(note)}</li>" for note in graded.notes), "</ul>"]
    if graded.tested:
        parts.append(f"<p>{escape(_computed(graded))}</p>")
    parts.append("</html>")
    return "\n".join(parts)


def _computed(graded: Graded) -> str:
    """Where its figures come from."""
    said = "Figures are computed from the records of every step"
    left = [task for task, tested in graded.tested.items() if not tested]
    return (
        f"{said}; model.pt was not tested again of {listed(left)}."
        if left
        else f"{said}, and model.pt was tested again."
    )


def _row(mark: Mark) -> str:
    kind = CLASSES.get(mark.outcome, mark.outcome)
    points = f"({mark.of:g})" if mark.outcome == "by hand" else f"{mark.points:g} of {mark.of:g}"
    why = "".join(f"<pre>{escape(line)}</pre>" for line in mark.lines)
    return f"<tr><td>{escape(mark.task)}<td class={kind}>{mark.outcome}<td>{points}<td>{why}</tr>"


def class_csv(everyone: Sequence[Graded]) -> str:
    """One line for each hand-in, one column for each task."""
    tasks = list(dict.fromkeys(mark.task for graded in everyone for mark in graded.marks))
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["student", "file", "lab", "counts", "points", "of", "by hand", "look at", *tasks])
    for graded in everyone:
        marks = {mark.task: "" if mark.outcome == "by hand" else f"{mark.points:g}" for mark in graded.marks}
        rows.writerow(
            [
                *map(_cell, (graded.student, graded.file_name, graded.lab, graded.counts)),
                f"{graded.points:g}",
                f"{graded.of:g}",
                f"{graded.by_hand:g}",
                _cell("; ".join(graded.flags)),
                *(marks.get(task, "") for task in tasks),
            ]
        )
    return text.getvalue()


def _cell(text: str) -> str:
    """A spreadsheet takes what begins with these for a formula, and students choose their names."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


def document(graded: Graded) -> dict[str, Any]:
    """What `lockstep lab check --json` prints of it."""
    return {
        "student": graded.student,
        "file": graded.file,
        "lab": graded.lab,
        "counts": graded.counts,
        "right": graded.right,
        "points": graded.points,
        "of": graded.of,
        "by_hand": graded.by_hand,
        "flags": graded.flags,
        "notes": graded.notes,
        "marks": [
            {"task": mark.task, "outcome": mark.outcome, "points": mark.points, "of": mark.of, "lines": mark.lines}
            for mark in graded.marks
        ],
        "gradescope": gradescope(graded),
        "seconds": graded.seconds,
    }


def gradescope(graded: Graded) -> dict[str, Any]:
    """The document that Gradescope's autograder reads as results.json."""
    return {
        "score": graded.points,
        "output": "\n".join([*graded.flags, *graded.notes]),
        "execution_time": round(graded.seconds),
        "tests": [
            {
                "name": mark.task,
                "score": mark.points,
                "max_score": 0.0 if mark.outcome == "by hand" else mark.of,
                "status": "passed" if mark.outcome in ("right", "by hand", "not settled") else "failed",
                "output": "\n".join(mark.lines),
            }
            for mark in graded.marks
        ],
    }


def write(everyone: Sequence[Graded], out: Path) -> Path:
    """All of it, below `out`. Returns the CSV's path."""
    taken: set[str] = set()
    for graded in everyone:
        plain = file_part(graded.student, 60).strip("-") or "student"
        # A student may have the name that another one's second folder gets.
        name, number = plain, 1
        while name in taken:
            number += 1
            name = f"{plain}-{number}"
        taken.add(name)
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "page.html", page(graded).encode())
        write_atomically(folder / "results.json", json.dumps(gradescope(graded), indent=1).encode())
    path = out / "class.csv"
    write_atomically(path, class_csv(everyone).encode())
    return path
