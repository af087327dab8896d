"""The answers that every view opens with: sentences from figures that are known, and the same words on page, paper and terminal."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console

from lockstep.explain import speedup
from lockstep.machine import starving
from lockstep.measure import phases
from lockstep.measure.view import view
from lockstep.placement import Placement
from lockstep.recipes import REPORTS
from lockstep.report import findings, steps
from lockstep.report.answers import Difference, Way, answers, next_step, sentence
from lockstep.report.document import report
from lockstep.report.html import page
from lockstep.report.inline import html, plain
from lockstep.report.markdown import markdown
from lockstep.report.run import attached_lines
from lockstep.report.spoken import names
from lockstep.report.subject import of_runs, of_study
from lockstep.report.terminal import draw
from lockstep.report.views import About, Said
from lockstep.run import Run, write_atomic, write_tags
from lockstep.study import reasons
from lockstep.study.compare import runs_document
from lockstep.study.reasons import Side
from lockstep.ways import BESIDE, FILE
from lockstep.ways import Way as Contender
from test_report import ALONE, BOTH, RECIPE, Folders, study_folder
from test_study_turns import Made


def speed(way: Way, effect: float, low: float | None = None, high: float | None = None, n: int = 5) -> Difference:
    return Difference("speed", "rate", way, effect, low, high, n, "start")


def points(way: Way, effect: float, low: float | None = None, high: float | None = None, n: int = 5) -> Difference:
    return Difference("accuracy", "accuracy", way, effect, low, high, n, "training")


def memory(way: Way, effect: float, low: float | None = None, high: float | None = None) -> Difference:
    return Difference("memory", "size", way, effect, low, high, 5, "start")


@pytest.mark.parametrize(
    ("name", "base", "told", "others", "said"),
    [
        (
            "global_batch=256", "global_batch=32", speed("more", 2.52, 2.3, 2.7), [points("less", -0.149, -0.16, -0.13)],
            "Batch 256 trains 2.5 times as fast as batch 32 and loses 15 points of accuracy",
        ),
        (
            "ranks=2 backend=gloo", "ranks=1", speed("open", 1.0, 0.8, 1.31), [],
            "2 ranks over gloo: not settled, between 0.8 and 1.3 times as fast as 1 rank",
        ),
        (
            "ranks=2", "ranks=1", speed("less", 0.5, 0.495, 0.505), [memory("more", 1.9, 1.5, 2.4), points("same", 0.0)],
            "2 ranks take 2.00 times as long as 1 rank and need 1.9 times the memory, with the same accuracy",
        ),
        (
            "shm", "gloo", speed("more", 1.08, 1.04, 1.12), [memory("less", 0.83, 0.7, 0.9), points("open", 0.001, -0.004, 0.006)],
            "shm trains 8 % faster than gloo and needs 17 % less memory; not settled: accuracy (between −0.4 and +0.6 points)",
        ),
        (
            "one, other", "a b", speed("same", 1.0, 0.99, 1.01), [],
            "'one, other' trains as fast as 'a b'",
        ),
        (
            "ranks=2", "ranks=1", speed("open", 0.5, n=1), [points("open", 0.0, n=1)],
            "2 ranks: not settled; in one start of each they took 2.0 times as long as 1 rank, with the same accuracy",
        ),
        (
            "optimizer.name=sgd", "optimizer.name=adam", None, [points("less", -0.28, -0.5, -0.1)],
            "sgd loses 28 points of accuracy against adam",
        ),
        (
            "optimizer.name=sgd", "optimizer.name=adam", speed("open", 1.4, 0.3, 4.0, 3), [points("less", -0.01, -0.012, -0.008)],
            "sgd: not settled, 1.4 times as fast as adam in 3 starts of each; it loses 1.0 points of accuracy",
        ),
    ],
)  # fmt: skip
def test_figures_as_people_say_them(
    name: str, base: str, told: Difference | None, others: list[Difference], said: str
) -> None:
    assert sentence(*names([base, name], base)[name], told, others) == said


@pytest.mark.parametrize(
    ("name", "base", "said", "than"),
    [
        ("ranks=2 threads=1", "ranks=1 threads=2", "2 ranks, 1 thread", "1 rank, 2 threads"),
        ("backend=gloo, launcher=spawn, ranks=2", "backend=None, launcher=single, ranks=1", "2 ranks over gloo", "1 rank"),
        ("optimizer.name=sgd, ranks=2", "optimizer.name=sgd, ranks=1", "2 ranks", "1 rank"),
        ("hosts=emulated:2 ranks=4", "ranks=4", "2 emulated hosts", "ranks=4"),
        ("fused=true", "fused=false", "fused kernels", "PyTorch's own kernels"),
        ("images=64 $ python a.py --amp", "$ python a.py", "'python a.py --amp'", "'python a.py'"),
        ("regularize.dropout=0.5", "base", "regularize.dropout=0.5", "base"),
        ("backend=gloo, ranks=1, threads=2", "backend=shm, ranks=2, threads=1", "1 rank, 2 threads", "2 ranks, 1 thread over shm"),
        ("ranks=1 (2)", "ranks=1", "'ranks=1 (2)'", "ranks=1"),
    ],
)  # fmt: skip
def test_cells_as_people_call_them(name: str, base: str, said: str, than: str) -> None:
    assert [each.text for each in names([base, name], base)[name]] == [said, than]


@pytest.mark.parametrize(
    ("name", "base", "said"),
    [
        ("fused=true", "fused=auto", "Fused kernels train 1.5 times as fast as fused=auto"),
        ("fused=false", "fused=auto", "PyTorch's own kernels train 1.5 times as fast as fused=auto"),
        ("compile=true", "compile=false", "torch.compile trains 1.5 times as fast as no torch.compile"),
    ],
)
def test_switches_as_people_call_them(name: str, base: str, said: str) -> None:
    assert sentence(*names([base, name], base)[name], speed("more", 1.5, 1.4, 1.6), []) == said


def test_cells_that_would_be_called_alike_keep_their_names() -> None:
    found = names(["ranks=1", "launcher=spawn ranks=2", "ranks=2"], "ranks=1")
    assert [who.text for who, _ in found.values()] == ["'launcher=spawn ranks=2'", "ranks=2"]


@pytest.fixture
def study(tmp_path: Path) -> Made:
    cells = {"small": {"global_batch": 32}, "large": {"global_batch": 96}, "2 ranks": {"global_batch": 32, "ranks": 2}}
    made = Made(tmp_path, cells=cells, repeats=5)
    made.race({"small": 100.0, "large": 50.0, "2 ranks": 60.0})
    made.train({"small": [0.9, 0.91, 0.92, 0.9, 0.91], "large": [0.8, 0.81, 0.82, 0.8, 0.81]})
    return made


def test_page_paper_terminal_and_notebook_open_with_the_same_sentences(study: Made) -> None:
    subject = of_study(study.folder)
    found = report([subject])
    told = [said.verdict for said in answers(subject)]
    assert told == [
        "large trains 2.00 times as fast as small and loses 10 points of accuracy",
        "2 ranks train 1.67 times as fast as small, with the same accuracy",
        "All have the same memory as small",
    ]
    out = Console(width=80, file=io.StringIO(), markup=False, highlight=False)
    draw(found.parts[0], out)
    assert isinstance(out.file, io.StringIO)
    terminal = " ".join(out.file.getvalue().split())
    places = {
        "terminal": (terminal, "cells 3"),
        "paper": (markdown(found), "**cells**"),
        "page": (page(found), '"table":'),
        "notebook": (plain(found.parts[0]), "next:"),
    }
    for where, (text, later) in places.items():
        assert all(one in text for one in told), where
        assert text.index(told[-1]) < text.index(later), f"{where}: the answer stands before {later}"


def test_reasons_and_the_next_command(study: Made) -> None:
    large, ranks, _ = answers(of_study(study.folder))
    assert large.why.startswith("a sample takes 62.") or "instead of" in large.why
    assert "global batch 96 instead of 32, so " in large.why
    assert "updates instead of" in large.why
    assert ranks.why == "2 cores instead of 1"
    subject = of_study(study.folder)
    assert next_step(subject, " --runs here") == "lockstep explain mine --runs here (why, cell by cell)"
    subject.comparison["stability"]["starved"] = "you had 40% of your cores"
    assert next_step(subject).startswith(starving.ADVICE), "a study of one's own: its command is not known"
    subject.comparison["metrics"] = ["accuracy"]
    assert next_step(subject).startswith("lockstep explain mine"), "what is learned does not depend on other work"


def test_more_cores_that_are_slower_are_no_reason_by_themselves(tmp_path: Path) -> None:
    cells = {"one": {"global_batch": 32}, "2 ranks": {"global_batch": 32, "ranks": 2}}
    made = Made(tmp_path, cells=cells, repeats=5)
    made.race({"one": 100.0, "2 ranks": 130.0})
    ranks = answers(of_study(made.folder))[0]
    assert ranks.why.startswith("with 2 cores instead of 1 a sample should take "), ranks
    assert "; beyond its share of that: " in ranks.why


def test_runs_made_once_settle_nothing_and_a_race_of_them_would(tmp_path: Path) -> None:
    folders = Folders(tmp_path)
    runs = [folders.run("a", placement=ALONE, seconds=10), folders.run("b", placement=BOTH, seconds=6.25)]
    subject = of_runs(runs)
    (said,) = answers(subject)
    assert said.verdict.startswith(
        "2 ranks with strategy ddp: not settled; in one run of each they trained 1.6 times as fast as 1 rank"
    )
    assert next_step(subject) == "lockstep race a b (settles which is faster, in a minute)"
    subject.comparison["stability"]["starved"] = "a had 40% of its cores"
    machine, doubted = answers(subject)
    assert machine.verdict == "a had 40% of its cores"
    assert machine.why == starving.UNEQUAL
    assert doubted.why == reasons.UNKNOWN, "no phase is blamed"
    assert doubted.verdict == f"Beside other work: {said.verdict}"
    assert next_step(subject, " --runs x") == f"lockstep race a b --runs x ({starving.AGAIN})"


def test_a_run_alone_opens_with_what_it_came_to(tmp_path: Path) -> None:
    folders = Folders(tmp_path)
    subject = of_runs([folders.run("a", placement=BOTH, seconds=6.25)])
    (said,) = answers(subject)
    assert said.verdict == (
        f"{RECIPE.model} on embedded reached a test accuracy of 90.00 % in 6.25 s, with 2 ranks over gloo; "
        "the largest part of a step is backward (50%)"
    )
    assert said.why.startswith(
        "a step takes 2.00 ms on average: data 5.0%, forward 25%, backward 50%, exchange 5.0%, waiting 5.0%"
    )
    assert said.why.endswith("rank 1 came last in 100% of the steps")
    told = report([subject]).parts[0]
    assert told.headlines[-1].next == "lockstep explain a (where its time goes)"
    assert html(told).index(said.verdict) < html(told).index("<table>"), "the answer first"
    assert "\n" not in plain(told, ["test accuracy"]).split("1. ")[0].strip(), "a run's text is one line"
    facts = dict(told.facts)
    assert facts["a step takes"].endswith("exchange 5%, waiting 5%, optimizer 8%, other 2%"), "as in the table below"
    assert answers(of_runs([folders.run("b", state="failed")])) == []


@pytest.mark.parametrize(
    ("placement", "summary", "said"),
    [
        (ALONE, {}, "reached a test accuracy of 90.00 % in 10.0 s, with 1 rank; the largest"),
        (ALONE, {"cores_had": 0.3}, "in 10.0 s, with 1 rank"),
        (ALONE, {"test_accuracy": None, "test_loss": None}, "took 120 steps in 10.0 s, with 1 rank"),
    ],
)
def test_what_a_run_alone_says(tmp_path: Path, placement: Placement, summary: dict[str, object], said: str) -> None:
    run = Folders(tmp_path).run("a", placement=placement)
    write_atomic(run.folder / "summary.json", {**(run.summary() or {}), **summary})
    (answer,) = answers(of_runs([run]))
    assert said in answer.verdict
    if "cores_had" in summary:
        assert answer.verdict.startswith("Beside other work: ")
        assert answer.verdict.endswith(said), "no phase is blamed"
        assert answer.why == ""


@pytest.mark.parametrize(("had", "begins"), [(None, "; most of it is backward (50%)"), (0.3, "")])
def test_an_attached_command_tells_waiting_apart_and_blames_no_phase_when_starved(
    tmp_path: Path, had: float | None, begins: str
) -> None:
    run = Folders(tmp_path).run("a")
    write_atomic(run.folder / "summary.json", {**(run.summary() or {}), "cores_had": had})
    seen = view(run)
    found = seen.phases()
    assert found is not None
    first, *lines = attached_lines(seen, seen.summary() or {}, found)
    assert first == f"lockstep: 120 steps on 2 ranks, 2.00 ms a step{begins}"
    parts = {line.split()[0]: line.split()[-1] for line in lines if line.startswith("  ")}
    assert (parts["exchange"], parts["waiting"]) == ("5.0%", "5.0%")


PARTS = {"forward": 2e-5, "backward": 1e-5, "exchange": 0.0, "total": 3e-5}


@pytest.mark.parametrize(
    ("ours", "faster", "alike", "starved", "why"),
    [
        (Side(2, {**PARTS, "total": 1.5e-5, "exchange": 3e-6}), True, True, False, "2 cores instead of 1; 20% of a step is exchange"),
        (
            Side(2, {"forward": 1.2e-5, "backward": 6e-6, "exchange": 3e-5, "total": 4.8e-5}), False, True, False,
            "with 2 cores instead of 1 a sample should take 15.0 µs and takes 48.0 µs; beyond its share of that: exchange 30.0 µs, forward 2.00 µs",
        ),
        (Side(2, {}), False, True, False, ""),
        # The whole training was slower with two; its steps are not.
        (Side(2, {**PARTS, "total": 2e-5}), False, True, False, ""),
        (Side(2, {"forward": 1e-5, "backward": 4e-6, "total": 1.4e-5}), False, True, False, ""),
        (Side(1, {**PARTS, "forward": 1e-5, "total": 2e-5}), True, False, False, "a sample takes 20.0 µs instead of 30.0 µs; the largest part of that is forward, 10.0 µs instead of 20.0 µs"),
        # The whole training was slower, its steps are not: they are no reason.
        (Side(1, {**PARTS, "forward": 1e-5, "total": 2e-5}), False, False, False, ""),
        (Side(1, {**PARTS, "forward": 1e-5, "total": 2e-5}), True, False, True, reasons.UNKNOWN),
        (Side(8, PARTS), True, True, True, "8 threads take turns on 4 cores"),
    ],
)  # fmt: skip
def test_why_one_is_faster(ours: Side, faster: bool, alike: bool, starved: bool, why: str) -> None:
    assert reasons.of_difference(ours, Side(1, PARTS), faster, alike, 4, starved) == why


def test_fewer_cores_that_are_faster_name_what_the_others_lose() -> None:
    more = Side(2, {"forward": 1.2e-5, "backward": 6e-6, "exchange": 3e-5, "total": 4.8e-5})
    said = reasons.of_difference(Side(1, PARTS), more, True, True, 4, False)
    assert said == reasons.of_difference(more, Side(1, PARTS), False, True, 4, False)


def test_accuracies_on_different_data_are_not_compared(tmp_path: Path) -> None:
    folders, other = Folders(tmp_path), msgspec.structs.replace(RECIPE, data="mnist")
    runs = [folders.run("a", placement=ALONE, accuracy=0.9), folders.run("b", other, ALONE, 8, accuracy=0.2)]
    (said,) = answers(of_runs(runs))
    assert said.verdict.startswith("mnist: not settled; in one run of each it trained 1.2 times as fast as embedded")
    assert "accuracy" not in said.verdict


@pytest.mark.parametrize(("tags", "names"), [(("mine", "mine"), ["a", "b"]), (("one", "two"), ["one", "two"])])
def test_very_different_runs_have_names_of_their_own(tmp_path: Path, tags: tuple[str, str], names: list[str]) -> None:
    """Cells are found by their names: two that are called alike would have each other's figures."""
    folders = Folders(tmp_path)
    other = msgspec.structs.replace(
        RECIPE,
        data="mnist",
        global_batch=12,
        epochs=7,
        compile=True,
        fused=False,
        loss="mse",
        normalize="none",
        precision="bf16",
    )
    runs = [folders.run("a", placement=ALONE), folders.run("b", other, msgspec.structs.replace(BOTH, timeout_s=9.0))]
    for run, tag in zip(runs, tags, strict=True):
        write_tags(run.folder, [tag])
    assert [group.name for group in of_runs(runs).groups] == names


def test_a_cell_that_is_left_out_is_no_cell_of_the_answer(tmp_path: Path) -> None:
    cells = {"small": {"global_batch": 32}, "large": {"global_batch": 96}, "five": {"global_batch": 32, "ranks": 5}}
    study = Made(tmp_path, cells=cells, repeats=5)
    study.race({"small": 100.0, "large": 50.0})
    study.train({"small": [0.9, 0.91, 0.92, 0.9, 0.91], "large": [0.8, 0.81, 0.82, 0.8, 0.81]})
    assert [said.verdict for said in answers(of_study(study.folder))][-1] == "five is left out"


def test_the_table_explains_what_stands_in_it(study: Made, tmp_path: Path) -> None:
    raced = report([of_study(study.folder)]).parts[0].table
    assert raced is not None
    assert "Time and memory are from turns" in raced.says
    assert "more" not in raced.says, "all is settled"
    alone = report([of_runs([Folders(tmp_path / "one").run("a")], compared=True)]).parts[0].table
    assert alone is not None
    assert alone.says == "Median of each cell with its 95 % interval."


def test_letters_of_reports_are_explained_where_they_first_stand(tmp_path: Path) -> None:
    part = report([of_study(study_folder(Folders(tmp_path), {"a": (RECIPE, ALONE), "b": (RECIPE, BOTH)}, 2))]).parts[0]
    assert part.about == f"what it is about. {REPORTS}."
    assert REPORTS not in part.notes


def test_efficiency_only_where_cores_differ(tmp_path: Path) -> None:
    folders = Folders(tmp_path)
    slow = msgspec.structs.replace(RECIPE, global_batch=RECIPE.global_batch // 2)
    runs = [folders.run("a", placement=ALONE), folders.run("b", slow, ALONE, 20), folders.run("c", placement=BOTH)]
    alike, differing = report([of_runs(runs[:2])]).parts[0], report([of_runs(runs)]).parts[0]
    assert alike.table is not None
    assert differing.table is not None
    assert ("speed-up" in alike.table.columns, "efficiency" in alike.table.columns) == (True, False)
    assert "efficiency" in differing.table.columns
    assert [cell["efficiency"] for cell in runs_document(runs[:2])["cells"]] == [None, None]


def test_what_every_cell_shares_is_said_once() -> None:
    slow = [Said("outside", f"{share}% of the run is evaluation", f"{share} s", cost=share / 100) for share in (5, 9)]
    own, epochs = Said("step", "most of a step is forward"), Said("overfitting", "too few epochs")
    found = findings.shared([About("a", [slow[0], epochs, own]), About("b", [epochs, slow[1]])])
    assert [(about.name, [said.verdict for said in about.findings]) for about in found] == [
        ("every cell", ["9% of the run is evaluation", "too few epochs"]),
        ("a", ["most of a step is forward"]),
    ]
    assert found[0].findings[0].why == "these figures are of 'b': 9 s"
    alone = [About("a", [own])]
    assert findings.shared(alone) == alone


def test_what_is_said_of_every_cell_is_true_of_every_cell() -> None:
    """What one cell should change to is another's own setting; and a reason with one cell's figures says whose they are."""
    chosen = [
        Said("recommendation", "for 80.8%, choose batch_per_rank=32: 2.41 s, 34% less than this run's 3.66 s"),
        Said("recommendation", "nothing that was run here reaches 80.8% sooner than this"),
        Said("recommendation", "for 80.8%, choose batch_per_rank=32: 2.41 s, 50% less than this run's 4.82 s"),
    ]
    changed = [Said("accuracy", "the recipe changed with the ranks", f"it is {2 * size}") for size in (16, 32, 64)]
    names = ("batch_per_rank=16", "batch_per_rank=32", "batch_per_rank=64")
    for few in (slice(3), slice(0, 3, 2)):
        each = zip(names[few], chosen[few], changed[few], strict=True)
        everywhere, *rest = findings.shared([About(name, list(said)) for name, *said in each])
        assert [(said.question, said.why) for said in everywhere.findings] == [
            ("accuracy", "these figures are of 'batch_per_rank=16': it is 32")
        ]
        assert [about.findings for about in rest] == [[said] for said in chosen[few]]
    nothing = Said("recommendation", "there is nothing to choose from: only this setting was run")
    assert findings.shared([About("a", [nothing]), About("b", [nothing])]) == [About("every cell", [nothing])]


def test_waiting_has_an_owner(tmp_path: Path) -> None:
    kind = [("exchange_ns", "i8")]
    ranks = [np.array([(200,)] * 6, dtype=kind), np.array([(100,)] * 5 + [(900,)], dtype=kind)]
    assert phases.last_in(ranks) == pytest.approx([1 / 6, 5 / 6])
    assert phases.waited_for(ranks) == "rank 1 came last in 83% of the steps"


@pytest.mark.parametrize(
    ("together", "said", "row"), [(14e-3, "rest 3.", "rest"), (9.2e-3, "less 1.", "counted twice")]
)
def test_a_negative_rest_is_not_a_saving(tmp_path: Path, together: float, said: str, row: str) -> None:
    run = Folders(tmp_path).run("one")
    parts = {
        **dict.fromkeys(("data", "forward", "backward", "optimizer", "other", "total"), 0.0),
        "exchange": 1e-3,
        "waiting": 5e-4,
    }
    seconds = {"whole": (16e-3, 1), "plain": (8.5e-3, 1), "apart": (9e-3, 2), "together": (together, 2)}
    ways = [
        Contender(name=name, samples=32, ranks=n, threads=1, steps=5, rounds=[[time] * n] * 5, phases=[parts] * n)
        for name, (time, n) in seconds.items()
    ]
    beside = Run(run.folder / BESIDE)
    beside.folder.mkdir(parents=True)
    write_atomic(beside.folder / FILE, {"ways": msgspec.to_builtins(ways)})
    beside.write_status("done")
    subject = of_runs([run])
    (waterfall,) = [chart for chart in steps.charts(subject) if chart.id == "speed-up"]
    assert waterfall.rows[-2].name == row
    assert ("is no saving" in waterfall.says) == (row != "rest")
    assert said in speedup._rest(*_measured(ways))


def _measured(ways: list[Contender]) -> tuple[dict[str, float], dict[str, speedup.Ends]]:
    by_name = {way.name: way for way in ways}
    return speedup.losses(by_name), speedup.intervals(by_name)
