"""How much of its cores a training had: the definition, what counts it, and every place that says it."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from lockstep.cli.commands import call
from lockstep.explain import explain
from lockstep.explain.evidence import Evidence
from lockstep.launch import waiting
from lockstep.machine import crowded, starving
from lockstep.machine.cores import cores
from lockstep.machine.cpu import children_seconds, seconds_of
from lockstep.machine.starving import DOUBT
from lockstep.metrics import METRICS, metric_of
from lockstep.placement import Placement
from lockstep.process import LINK
from lockstep.report import cells, doubt
from lockstep.report.answers import answers
from lockstep.report.document import of_parts
from lockstep.report.html import page
from lockstep.report.inline import html
from lockstep.report.latex import table_text
from lockstep.report.markdown import markdown
from lockstep.report.race import race_part
from lockstep.report.subject import of_runs, of_study
from lockstep.report.terminal import draw
from lockstep.run import Run
from lockstep.shapes import Spent
from lockstep.study import reasons
from lockstep.turns import Before, Budget, Command, Race
from lockstep.turns.estimate import Window
from lockstep.turns.folder import RaceFolder, Record, state_of
from lockstep.ways import BESIDE, FILE
from support import Cli
from test_explain import Folder, folder, rows, way, write_steps, write_ways
from test_race_report import made_up, raced
from test_study_turns import Made

__all__ = ["folder"]
SPIN = "while True: pass"


def spent(used: float, waited: float = 0.0, others: float = 0.0, stolen: float = 0.0) -> Spent:
    return Spent(used=used, waited=waited, others=others, stolen=stolen)


class Busy:
    """Other work that could use every core three times."""

    def __init__(self) -> None:
        self._loops = [subprocess.Popen([sys.executable, "-S", "-c", SPIN]) for _ in range(3 * (os.cpu_count() or 1))]

    def end(self) -> None:
        for loop in self._loops:
            loop.kill()
            loop.wait()


@pytest.fixture
def busy() -> Iterator[Busy]:
    found = Busy()
    try:
        yield found
    finally:
        found.end()


@pytest.mark.parametrize(
    ("seconds", "share"),
    [
        (spent(10.0), 1.0),
        (spent(10.0, waited=10.0, others=30.0), 0.5),
        # Threads that waited behind each other: nobody else ran.
        (spent(10.0, waited=10.0, others=0.0), 1.0),
        (spent(10.0, waited=10.0, others=-0.02), 1.0),
        (spent(10.0, waited=30.0, others=10.0), 0.5),
        # What the hypervisor took was taken from all that ran, by their part of it.
        (spent(10.0, stolen=10.0), 0.5),
        (spent(5.0, others=15.0, stolen=4.0), 5 / 6),
        # Nothing is known, or too little was asked for.
        (spent(0.0, waited=3.0, others=3.0), None),
        (spent(0.2, waited=0.1, others=1.0), None),
    ],
)
def test_the_share_of_its_cores_that_a_training_had(seconds: Spent, share: float | None) -> None:
    assert starving.had(seconds) == (None if share is None else pytest.approx(share))
    assert starving.starved(starving.had(seconds)) == (share is not None and share < starving.STARVED)


def test_parts_add_up() -> None:
    parts = [spent(1.0, 2.0, 3.0, 4.0), spent(10.0, 20.0, 30.0, 40.0)]
    assert starving.total(parts) == spent(11.0, 22.0, 33.0, 44.0)
    assert starving.total([]) is None
    assert starving.sentence(0.234).startswith("you had 23% of your cores")


METER = """
import json
from lockstep.machine.starving import Meter
meter = Meter(first=True)
while (found := meter.read())["used"] < 0.6:
    sum(range(100_000))
print(json.dumps(found))
"""


def test_a_process_sees_that_others_have_its_cores(busy: Busy) -> None:
    found = subprocess.run([sys.executable, "-c", METER], capture_output=True, text=True, check=True)
    spent = json.loads(found.stdout)
    share = starving.had(spent)
    assert starving.starved(share), spent


def test_what_its_own_children_run_is_not_other_work() -> None:
    before = children_seconds()
    child = subprocess.Popen([sys.executable, "-S", "-c", SPIN])
    while children_seconds() < before + 0.1:
        assert child.poll() is None
    child.kill()
    child.wait()
    assert children_seconds() >= before + 0.1, "also when it has ended"


def test_what_carries_packets_between_emulated_hosts_is_not_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a child of the command, and not of a rank."""
    link = subprocess.run(
        ["sh", "-c", f"{sys.executable} -S -c '{SPIN}' > /dev/null 2>&1 & echo $!"],
        capture_output=True,
        text=True,
        check=True,
    )
    pid = int(link.stdout)
    try:
        stranger = starving.Meter(first=True)
        monkeypatch.setenv(LINK, str(pid))
        ours = starving.Meter(first=True)
        began = seconds_of(pid)
        while seconds_of(pid) < began + 0.5:
            time.sleep(0.01)
        others = ours.read()["others"]
        monkeypatch.delenv(LINK)
        assert stranger.read()["others"] - others == pytest.approx(0.5, abs=0.2)
    finally:
        os.kill(pid, signal.SIGKILL)


# Who says it


BASE = {"data": 100, "forward": 3000, "backward": 6000, "optimizer": 100, "total": 9400}


def test_explain_says_it_first_and_trusts_no_time_then(folder: Folder) -> None:
    run = folder.run(cores_had=0.23)
    write_steps(run, rows(200, **BASE), rows(200, **BASE))
    first, *rest = explain(Evidence(run))
    assert (first.question, first.cause) == ("machine", "neighbour")
    assert first.verdict.startswith("you had 23% of your cores")
    doubted = {finding.question for finding in rest if finding.why.endswith(DOUBT)}
    assert {"step", "straggler"} <= doubted
    assert not doubted & {"accuracy", "overfitting"}
    (step,) = explain(Evidence(run), ("step",))
    assert step.why.endswith(DOUBT), "also where nothing else is asked"
    assert step.verdict == "other work had the cores: where the 9.40 ms of a step go is not known"
    enough = folder.run(cores_had=0.95)
    write_steps(enough, rows(200, **BASE), rows(200, **BASE))
    assert not [
        finding for finding in explain(Evidence(enough)) if DOUBT in finding.why or finding.question == "machine"
    ]


def test_what_was_measured_beside_a_run_may_have_been_starved_too(folder: Folder) -> None:
    run = folder.run(cores_had=0.99)
    write_steps(run, rows(200, **BASE), rows(200, **BASE))
    write_ways(run, way("plain", 10.0), way("apart", 11.0, ranks=2), way("together", 12.0, ranks=2))
    assert not explain(Evidence(run), ("machine",))
    path = run.folder / BESIDE / FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "spent": spent(5.0, waited=5.0, others=20.0)}))
    (found,) = explain(Evidence(run), ("machine",))
    assert found.verdict.startswith("the measurement beside it had 50% of its cores")


def test_a_race_says_it_in_its_answer() -> None:
    quiet = made_up({"ranks=1": 1.0, "ranks=2": 0.6})
    starved = [msgspec.structs.replace(each, spent=spent(1.0, waited=3.0, others=9.0)) for each in quiet]
    record = raced(quiet, ["ranks=1", "ranks=2"])
    first, _ = race_part(record, starved, "a-race").headlines
    assert "you had 25% of your cores" in first.verdict
    assert "cores" not in race_part(record, quiet, "a-race").headlines[0].verdict


def starved_race() -> tuple[Record, list[Window]]:
    windows = made_up({"ranks=1": 1.0, "ranks=2": 1.6})
    windows = [msgspec.structs.replace(each, spent=spent(1.0, waited=3.0, others=9.0)) for each in windows]
    return raced(windows, ["ranks=1", "ranks=2"]), windows


def test_no_phase_is_blamed_for_what_other_work_did() -> None:
    record, windows = starved_race()
    answer = race_part(record, windows, "a-race").headlines[-1]
    assert answer.verdict.startswith("Beside other work: 2 ranks take 1.60 times as long")
    assert answer.why == reasons.UNKNOWN


def test_every_view_of_a_starved_race_marks_what_it_settled_and_says_once_what_the_mark_means() -> None:
    record, windows = starved_race()
    part = race_part(record, windows, "a-race")
    out = Console(file=io.StringIO(), width=120, record=True)
    draw(part, out)
    told = of_parts([part])
    views = {
        "terminal": out.export_text(),
        "markdown": markdown(told).replace("\\", ""),
        "notebook": html(part),
        "paper": table_text(part.table, "race").replace("{*}", "*") if part.table else "",
        "page": page(told),
    }
    for name, text in views.items():
        assert "slower*" in text, name
        assert text.count(doubt.NOTE) == 1, name
    assert part.headlines[-1].next == (
        f"lockstep race ranks=1 ranks=2 --all data=embedded --budget 60s --until 2% ({starving.AGAIN})"
    )
    quiet = made_up({"ranks=1": 1.0, "ranks=2": 1.6})
    assert doubt.MARK not in markdown(of_parts([race_part(record, quiet, "a-race")])).replace("**", "")


def test_a_starved_study_marks_times_and_not_what_was_learned(tmp_path: Path) -> None:
    made = Made(tmp_path, cells={"one": {"ranks": 1}, "two": {"ranks": 2}}, repeats=5)
    made.race({"one": 100.0, "two": 60.0})
    subject = of_study(made.folder)
    plain = cells.table(subject)
    subject.comparison["stability"]["starved"] = "you had 40% of your cores"
    found = cells.table(subject)
    assert plain
    assert found
    assert (plain.below, found.below) == ("", doubt.NOTE)
    titles = {metric_of(name).title(subject.comparison["target_accuracy"]): metric_of(name) for name in METRICS}
    for column, before, after in zip(found.columns, plain.rows[1], found.rows[1], strict=True):
        marked = [text for text in (after.text, *after.notes) if text.endswith(doubt.MARK)]
        timed = column in ("speed-up", "efficiency") or (column in titles and titles[column].timed)
        assert bool(marked) is timed, column
        assert [text.removesuffix(doubt.MARK) for text in (after.text, *after.notes)] == [before.text, *before.notes]
    assert found.rows[0] == plain.rows[0], "the baseline is compared with nothing"


def test_foreign_programs_on_a_busy_machine_are_said_to_be_that() -> None:
    """Of what they had of their cores nothing is known, but what others took of the machine is."""
    record, windows = starved_race()
    alone = [msgspec.structs.replace(each, spent=None, foreign=0.4) for each in windows]
    machine, answer = race_part(record, alone, "a-race").headlines
    assert machine.verdict == "other work took 40% of the machine"
    assert answer.verdict.startswith("Beside other work: 2 ranks take 1.60 times as long")
    assert answer.why == reasons.UNKNOWN


def test_the_record_of_a_race_has_the_share() -> None:
    record, windows = starved_race()
    race = Race([Command("ranks=1", []), Command("ranks=2", [])], Budget(), before=Before(windows=windows))
    kept = msgspec.to_builtins(state_of(race, record, over=True))
    assert kept["cores_had"] == pytest.approx(0.25)
    old = {key: value for key, value in kept.items() if key != "cores_had"}
    assert msgspec.convert(old, Record).cores_had is None


@pytest.mark.parametrize(("foreign", "known"), [(0.0, True), (0.0, False), (0.4, False)])
def test_a_slower_contender_on_a_busy_machine_is_said_to_be_that(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], foreign: float, known: bool
) -> None:
    """Of foreign programs, which CI races, only what others took of the machine is known."""
    record, windows = starved_race()
    folder = RaceFolder.create(cli.runs, "mine")
    folder.keep(
        [msgspec.structs.replace(each, foreign=foreign, spent=each.spent if known else None) for each in windows]
    )
    monkeypatch.setattr("lockstep.turns.hold.hold", lambda *_: (folder, record))
    assert call(["race", "ranks=1", "ranks=2", "--fail-if-slower", "--json"]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("lockstep: race: slower than 'ranks=1': 'ranks=2', 0.6")
    meanwhile = "you had 25% of your cores: other work on this machine had the rest" if known else ""
    meanwhile = meanwhile or ("other work took 40% of the machine" if foreign else "")
    assert said.endswith(f"as fast; {meanwhile}" if meanwhile else "as fast")


def test_a_comparison_says_it_before_all_else(folder: Folder) -> None:
    runs = [
        folder.run(train_seconds=seconds, images_per_second=100 / seconds, cores_had=had)
        for seconds, had in ((1.0, 0.98), (1.2, 0.4))
    ]
    first = answers(of_runs(runs))[0]
    assert (first.question, first.verdict.partition(":")[0]) == ("machine", "run-2 had 40% of its cores")


# How threads wait


@pytest.mark.parametrize(
    ("seen", "taken"),
    [([1], 0), ([3, 3, 3, 3, 3, 3, 3], 2), ([9] * 7, 2), ([9, 9, 1], 0), ([None], 0)],
)
def test_cores_are_taken_where_other_work_stays(
    seen: list[int | None], taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crowded, "cores", lambda: 2)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    looks = iter(seen)
    monkeypatch.setattr(crowded, "runnable", lambda: next(looks))
    assert crowded.taken() == taken


def test_only_a_run_that_states_no_threads_waits_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in waiting.STATED:
        monkeypatch.delenv(name, raising=False)
    resolved = Placement(threads=2, device="cpu", launcher="single")
    assert "OMP_WAIT_POLICY=passive" in waiting.reason(Placement(), resolved, 2)
    assert not waiting.reason(Placement(), resolved, 0), "a quiet machine"
    assert not waiting.reason(Placement(threads=2), resolved, 2), "stated"
    assert not waiting.reason(Placement(), Placement(threads=1, device="cpu"), 2), "nobody waits"
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    assert not waiting.reason(Placement(), resolved, 2), "the user has decided"


@pytest.mark.slow
@pytest.mark.cold
@pytest.mark.skipif(cores() < 2, reason="one core has one thread, which waits for nobody")
def test_a_run_beside_other_work_says_so_and_computes_the_same(cli: Cli, busy: Busy) -> None:
    """Cold: OpenMP reads how threads wait when it is loaded."""
    words = ("data=embedded", "train_limit=6400", "test_limit=500", "epochs=1", "fused=false")
    found = cli("run", *words, "--name", "beside", "--quiet")
    assert found.returncode == 0, found.stderr
    assert "other work has" in found.stderr
    busy.end()
    run = Run(cli.runs / "beside")
    assert run.spec().options.sleep_to_wait
    assert any("OMP_WAIT_POLICY=passive" in word for word in run.spec().command[0])
    shown = cli("show", "beside").stdout
    assert "% of your cores" in shown
    assert "threads sleep" in " ".join(shown.split())
    assert "% of your cores" in cli("explain", "beside").stdout.partition("next")[0]
    alone = cli.run(*words, "threads=2")
    assert alone["weights_sha256"] == (run.summary() or {})["weights_sha256"], (
        "how threads wait is not what they add up"
    )
