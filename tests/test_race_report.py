"""What a race says, in the terminal and on its page: made-up windows, so that the truth is known."""

from __future__ import annotations

import io
import re

import msgspec
import pytest
from rich.console import Console

from lockstep.placement import Placement
from lockstep.recipe import Recipe
from lockstep.report.document import of_parts
from lockstep.report.html import page
from lockstep.report.race import next_step, race_part
from lockstep.report.terminal import draw
from lockstep.turns import Budget, estimate
from lockstep.turns.estimate import Window
from lockstep.turns.folder import Entry, RaceFolder, Record, opening
from support import Cli

STARTS = 6


def made_up(seconds: dict[str, float], jitter: float = 0.001) -> list[Window]:
    """Windows of contenders that take so many seconds, with a little noise from start to start."""
    return [
        Window(
            contender=name,
            start=start,
            round=round,
            steps=10,
            samples=100,
            wall=wall * (1 + jitter * ((7 * start + 3 * number) % 5 - 2)),
            cpu=wall,
            phases={
                "data": 0.0,
                "forward": wall / 4,
                "backward": wall / 2,
                "exchange": wall / 8,
                "optimizer": wall / 8,
            },
        )
        for start in range(1, STARTS + 1)
        for round in range(1, 5)
        for number, (name, wall) in enumerate(seconds.items())
    ]


def raced(windows: list[Window], names: list[str], **more: object) -> Record:
    entries = [Entry(name=name, recipe=Recipe(), placement=Placement()) for name in names]
    found = estimate.ratios(windows, [(name, names[0]) for name in names[1:]])
    record = opening(entries, "data=embedded", Budget())
    return msgspec.structs.replace(record, ratios=found, starts=STARTS, over=True, seconds=12.0, **more)


def drawn(record: Record, windows: list[Window], width: int = 80) -> str:
    out = Console(width=width, record=True, file=io.StringIO(), markup=False, highlight=False)
    draw(race_part(record, windows, "a-race"), out)
    return out.export_text()


@pytest.mark.parametrize(
    ("seconds", "jitter", "said"),
    [
        ({"ranks=1": 1.0, "ranks=2": 0.6}, 0.001, r"• 2 ranks train 1\.67 times as fast as 1 rank "),
        ({"ranks=1": 1.0, "ranks=2": 1.3}, 0.001, r"• 2 ranks take 1\.30 times as long as 1 rank "),
        ({"ranks=1": 1.0, "ranks=2": 1.001}, 0.001, r"• 2 ranks train as fast as 1 rank "),
        (
            {"ranks=1": 1.0, "ranks=2": 1.05},
            0.1,
            r"• 2 ranks: not settled, between 0\.\d and 1\.\d times as fast as 1 rank ",
        ),
    ],
)
def test_the_answer_is_one_sentence(seconds: dict[str, float], jitter: float, said: str) -> None:
    windows = made_up(seconds, jitter)
    record = raced(windows, list(seconds))
    text = " ".join(drawn(record, windows).split())
    assert re.search(said, text), text
    assert max(map(len, drawn(record, windows, 80).splitlines())) <= 80


def test_the_phase_that_has_most_of_the_difference_is_named() -> None:
    windows = made_up({"ranks=1": 1.0, "ranks=2": 0.6}, jitter=0.0)
    text = " ".join(drawn(raced(windows, ["ranks=1", "ranks=2"]), windows).split())
    assert "a sample takes 6.00 ms instead of 10.0 ms; the largest part of that is backward, 3.00 ms instead" in text
    assert next_step(raced(windows, ["ranks=1", "ranks=2"]), windows) == "lockstep run data=embedded ranks=2"


def test_a_contender_that_failed_is_shown_with_the_reason() -> None:
    windows = made_up({"ranks=1": 1.0, "ranks=2": 0.6})
    record = raced(windows, ["ranks=1", "ranks=2"])
    broken = Entry(name="ranks=3", recipe=Recipe(), placement=Placement())
    record = msgspec.structs.replace(
        record, entries=[*record.entries, broken], failures={"ranks=3": "rank 2 was killed"}
    )
    assert "rank 2 was killed" in drawn(record, windows, 120)


def test_a_page_has_the_answer_the_curve_and_the_command() -> None:
    windows = made_up({"ranks=1": 1.0, "ranks=2 backend=shm": 0.6})
    part = race_part(raced(windows, ["ranks=1", "ranks=2 backend=shm"]), windows, "a-race")
    speeds, settled = part.charts
    assert [len(series.x) for series in settled.series] == [STARTS - 2]  # type: ignore[union-attr]
    assert [row.value for row in speeds.rows] == pytest.approx([1, 1 / 0.6], rel=0.01)  # type: ignore[union-attr]
    text = page(of_parts([part]))
    assert "2 ranks over shm train 1.67 times as fast as 1 rank" in text
    assert part.commands[0].lines == [
        "lockstep race ranks=1 'ranks=2 backend=shm' --all data=embedded --budget 60s --until 2%"
    ]


def test_a_kept_race_is_read_again_by_report(cli: Cli) -> None:
    folder = RaceFolder.create(cli.runs, "mine")
    windows = made_up({"ranks=1": 1.0, "ranks=2": 0.6})
    folder.keep(windows)
    folder.write(raced(windows, ["ranks=1", "ranks=2"]))
    assert folder.windows() == windows
    found = cli("report", "mine", "-o", "race.md")
    assert found.returncode == 0, found.stderr
    assert "2 ranks train 1.67 times as fast as 1 rank" in (cli.folder / "race.md").read_text()
    (folder.path / "race.json").write_text('{"format": 1, "entries"')
    assert "race.json" in cli.error("report", "mine", code=2)


@pytest.mark.parametrize(("changed", "said"), [({"fused": False}, False), ({"global_batch": 64}, True)])
def test_who_does_not_compute_the_same_is_said(changed: dict[str, object], said: bool) -> None:
    windows = made_up({"a": 1.0, "b": 0.6})
    record = raced(windows, ["a", "b"])
    other = msgspec.structs.replace(record.entries[1], recipe=msgspec.structs.replace(Recipe(), **changed))
    record = msgspec.structs.replace(record, entries=[record.entries[0], other])
    assert ("do not compute the same" in drawn(record, windows)) == said
