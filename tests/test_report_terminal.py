"""The terminal as a renderer of the document: tables that fit the window, plots of characters."""

from __future__ import annotations

import io
import re
from itertools import pairwise

import pytest
from rich.console import Console

from lockstep.report import characters
from lockstep.report.terminal import Grid, draw_table, print_table
from lockstep.report.views import Axis, Bar, Bars, Cell, Fall, Lines, Said, Series, Table, Waterfall

ID = "20260101-120000-mnist-convnet-spawn-2r-a1b2"
FIGURE = Cell(text="10.2 s (9.98–10.4)", value=10.2, notes=["0.625× (0.601–0.648)", "not significant, 7 to 40 more"])


def terminal(width: int) -> Console:
    return Console(width=width, file=io.StringIO(), markup=False, highlight=False)


def shown(out: Console) -> str:
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def wide(columns: int) -> Table:
    return Table(
        id="cells",
        title="",
        says="",
        columns=["cell", *(f"metric {number}" for number in range(columns))],
        rows=[[Cell(text=f"ranks={ranks}, global_batch=1024"), *[FIGURE] * columns] for ranks in (1, 2)],
        right=list(range(1, columns + 1)),
        spare=[2],
    )


@pytest.mark.parametrize("width", [60, 80, 100, 120, 160])
def test_a_table_fits_the_window_and_breaks_no_word_and_no_number(width: int) -> None:
    table = wide(6)
    out = terminal(width)
    draw_table(table, out)
    lines = shown(out).splitlines()
    assert max(map(len, lines)) <= width
    left_out = re.search(r"Left out at \d+ columns: (.*)\.", " ".join(shown(out).split()))
    gone = left_out.group(1).split(", ") if left_out else []
    assert ("metric 1" in gone) == bool(gone), "the spare one goes first"
    kept = [name for name in table.columns[1:] if name not in gone]
    assert kept, "a narrow window has something too"
    for piece in ("7 to 40 more", "10.2 s", "(9.98–10.4)", "(0.601–0.648)", "global_batch=1024"):
        assert sum(piece in line for line in lines) >= 2, piece
    assert shown(out).count("10.2 s") == 2 * len(kept)


def test_an_id_that_is_wider_than_the_window_stays_whole() -> None:
    out = terminal(30)
    print_table(["id", "state"], [[ID, "done"]], out=out)
    assert ID in shown(out)
    assert "Left out at 30 columns: state." in shown(out)


def test_columns_get_the_room_that_others_leave() -> None:
    rows = [["a word or two, and some more of them", "12 s (11–13)"]]
    grid = Grid(["text", "number"], rows, right=[1])
    assert grid.fit(80, []) == ({0: 36, 1: 12}, [])
    widths, left_out = grid.fit(34, [])
    assert (sum(widths.values()) + 2, left_out) == (34, [])
    assert widths[1] == 12, "the one that needs least is whole"


def test_wide_characters_count_twice() -> None:
    out = terminal(80)
    print_table(["name", "n"], [["模型", "1"], ["model", "2"]], right=[1], out=out)
    assert shown(out).splitlines()[2:] == ["模型   1", "model  2"]


def curve(**more: object) -> Lines:
    fields = {"x": [1.0, 5.0], "y": [0.0, 1.0], **more}
    series = [Series(name="a", colour="c0", x=fields["x"], y=fields["y"])]  # type: ignore[arg-type]
    log = bool(more.get("log"))
    axes = {"x": Axis(label="epoch", unit="count", log=log), "y": Axis(label="share", unit="percent", log=log)}
    return Lines(id="rise", section="s", title="rise", says="", series=series, **axes)


def test_a_curve_of_characters_rises_from_the_bottom_left_to_the_top_right() -> None:
    text = characters.curves(curve())
    assert text is not None
    drawn = text.plain.splitlines()
    assert drawn[0] == "rise  ── a"
    first, last = drawn[1], drawn[characters.HEIGHT]
    assert (first[:10], last[:10]) == ("100.00 % ┤", "  0.00 % ┤")
    assert (first[-1] != " ", first[10]) == (True, " ")
    assert (last[10] != " ", last[-1]) == (True, " ")
    assert drawn[-1].split() == ["1", "5", "epoch"]


def test_a_logarithmic_curve_is_straight_and_skips_zero() -> None:
    text = characters.curves(curve(x=[1.0, 10.0, 100.0], y=[0.01, 0.1, 1.0], log=True))
    assert text is not None
    rows = text.plain.splitlines()[1 : characters.HEIGHT + 1]
    firsts = [len(row) - len(row[10:].lstrip()) for row in rows]
    steps = [before - after for before, after in pairwise(firsts)]
    assert max(steps) - min(steps) <= 2, "each row goes as far to the left as the one above it"
    assert characters.curves(curve(x=[0.0, 1.0], y=[1.0, 1.0], log=True)) is None


def test_a_share_of_the_time_is_written_as_in_the_sentence_beside_it() -> None:
    said = Said("outside", "6.5% of the run is evaluation", "why", "next", 0.0653)
    assert (said.share(), said.lines()) == ("6.5% of the time", [("why", "why"), ("next", "next")])
    assert Said("outside", "nothing", cost=0.001).share() == ""
    assert Said("outside", "nothing").lines() == []


def test_bars_of_characters_are_as_long_as_their_values() -> None:
    rows = [[Cell(text="a"), Cell(text="10 s", value=10.0)], [Cell(text="b"), Cell(text="5 s (4–6)", value=5.0)]]
    (drawn,) = characters.table_bars(Table("t", "", "", ["cell", "time"], rows, bars=[1]), 100)
    lines = drawn.plain.splitlines()
    assert (lines[0], [line.count("█") for line in lines[1:]]) == ("time", [40, 20])
    assert lines[2].endswith("5 s (4–6)")
    axis = Axis(label="time", unit="seconds")
    stacked = characters.figure(Bars("b", "s", "step", "", axis, ["data", "forward"], [Bar("rank 0", [1.0, 3.0])]))
    assert stacked is not None
    assert (stacked.plain.count("█") - 1, stacked.plain.count("▓") - 1) == (15, 45), "one more of each in the legend"
    falls = characters.figure(
        Waterfall("w", "s", "fall", "", axis, [Fall("ideal", 1.0, True, "1 s"), Fall("lost", 1.0, False, "+1 s")])
    )
    assert falls is not None
    assert falls.plain.splitlines()[1:] == [f"ideal {'█' * 20}{' ' * 20} 1 s", f" lost {' ' * 20}{'█' * 20} +1 s"]
