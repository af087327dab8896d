"""Texts from outside, printed: nothing in them is markup, moves the cursor, or ends in an encoding error."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli import commands as cli
from lockstep.cli.output import console, note, print_table, styled
from lockstep.placement import Placement
from lockstep.plan import plan
from lockstep.recipe import Recipe
from lockstep.report.terminal import draw
from lockstep.report.views import Axis, Bar, Bars, Cell, Claim, Lines, Mark, Part, Published, Said, Series, Table
from lockstep.run import Run, Spec, write_atomic
from lockstep.text import file_part, finite, printable

# gloo's own text, a name in brackets, an escape that clears the screen, a half character, a backspace.
HOSTILE = "[/pytorch/third_party/gloo] Connection closed [rank0] :boom: \x1b[2J\x1b]0;x\x07 \ud800 \x08\x9b2J"
SEEN = "[/pytorch/third_party/gloo] Connection closed [rank0] :boom: \\x1b[2J\\x1b]0;x\\x07 \\ud800 \\x08\\x9b2J"


@contextmanager
def strict() -> Iterator[Callable[[], str]]:
    """Standard output as it is in a process: UTF-8 that refuses half characters."""
    kept = io.BytesIO()
    with redirect_stdout(io.TextIOWrapper(kept, "utf-8", write_through=True)):
        yield lambda: kept.getvalue().decode()


def test_text_from_outside_is_printed_as_it_is_and_does_nothing_to_the_terminal() -> None:
    assert printable(HOSTILE) == SEEN
    with strict() as read:
        console().print(HOSTILE, soft_wrap=True)
        print_table([HOSTILE], [[HOSTILE], [styled((HOSTILE, "red"))]])
        console().print(styled("x ", (HOSTILE, "bold")), soft_wrap=True)
        seen = read()
    assert seen.count(SEEN) == 5, seen
    assert not set("\x1b\x07") & set(seen)


def test_a_run_that_failed_with_such_a_text_is_shown_and_compared(tmp_path: Path) -> None:
    recipe, placement = Recipe(data="embedded"), Placement(launcher="single", strategy="single", threads=1)
    worked = plan(recipe, placement, 1000, 500)
    spec = Spec(id="a-run", created=1.0, lockstep="0", recipe=recipe, placement=placement, plan=worked)
    Run.create(tmp_path, spec).write_status("failed", cause=HOSTILE.replace("\ud800", "x"))
    with strict() as read:
        assert cli.call(["show", "a-run", "--runs", str(tmp_path)]) == 0
        assert cli.call(["compare", "a-run", "--runs", str(tmp_path)]) == 0
        assert read().count("Connection closed [rank0] :boom: \\x1b[2J") == 2


def test_errors_and_notes_are_printable_too(capsys: pytest.CaptureFixture[str]) -> None:
    note(HOSTILE)
    assert cli.call([HOSTILE]) == 2
    assert cli.call([HOSTILE.replace("\ud800", "")]) == 2
    assert cli.call(["show", "no\0name"]) == 2
    said = capsys.readouterr().err
    assert not set("\x1b\x07\ud800") & set(said)


def test_json_has_no_nan_and_no_infinity(tmp_path: Path) -> None:
    odd: dict[str, Any] = {"a": float("nan"), "b": [float("inf"), 1.5, (2, -float("inf"))], "c": "NaN"}
    assert finite(odd) == {"a": None, "b": [None, 1.5, [2, None]], "c": "NaN"}
    write_atomic(tmp_path / "x.json", odd)
    assert json.loads((tmp_path / "x.json").read_text(), parse_constant=pytest.fail) == finite(odd)


@pytest.mark.parametrize(
    ("text", "part"), [("Ana Li", "Ana-Li"), ("../Łukasz_2", "---Łukasz_2"), ("a" * 50, "a" * 40), ("\ud800;", "--")]
)
def test_a_part_of_a_files_name_leads_nowhere_else(text: str, part: str) -> None:
    assert file_part(text, 40) == part


def test_a_part_of_the_document_is_printed_as_it_is() -> None:
    cell = Cell(text=HOSTILE, notes=[HOSTILE])
    part = Part(
        name="[/x]",
        kind="study",
        about=HOSTILE,
        facts=[(HOSTILE, HOSTILE)],
        headlines=[Said(question=HOSTILE, verdict=HOSTILE, why=HOSTILE, next=HOSTILE)],
        notes=[HOSTILE],
        table=Table(id="t", title="t", says=HOSTILE, columns=[HOSTILE], rows=[[cell]]),
        published=[Published(source=HOSTILE, claims=[Claim(text=HOSTILE, verdict=HOSTILE, figures=HOSTILE)])],
        charts=[
            Lines(
                id="l",
                section="s",
                title=HOSTILE,
                says="",
                x=Axis(label="x"),
                y=Axis(label="y"),
                series=[Series(name=HOSTILE, colour="c0", x=[1, 2], y=[1, 2])],
                marks=[Mark(x=1, text=HOSTILE)],
            ),
            Bars(
                id="b", section="s", title=HOSTILE, says="", x=Axis(label="x"), parts=["p"], rows=[Bar(HOSTILE, [1.0])]
            ),
        ],
    )
    with strict() as read:
        draw(part, console(), plots=True)
        assert "".join(read().split()).count("".join(SEEN.split())) >= 18
