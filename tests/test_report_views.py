"""Every view that there is, in a real browser: no error and no warning in its console, and nothing cut off on a screen, a phone and paper."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import house
from lockstep.inside.layout import LOGGED_FILE
from lockstep.lab import pages as lab_pages
from lockstep.lab.graded import Graded, Mark
from lockstep.placement import Placement
from lockstep.recipe import Recipe, Schedule
from lockstep.report.document import of_parts, report
from lockstep.report.html import page as page_of
from lockstep.report.proof import proof_part
from lockstep.report.race import race_part
from lockstep.report.subject import of_runs, of_study
from lockstep.report.tune import tune_part
from lockstep.report.views import Report
from lockstep.run import Options, Run, append_line, write_atomic
from lockstep.study.folder import StudyFolder
from lockstep.study.unpack import unpack
from lockstep.tune import Found, Otherwise
from lockstep.verify.foreign.judge import OPEN, SAME, Judge
from support import wait_for
from test_dashboard_browser import Served
from test_race_report import made_up, raced
from test_report import ALONE, RECIPE, Folders, compared, fit_for, isolated
from test_report_browser import Opened, measure
from test_starving import starved_race
from test_verify_foreign_judge import script

pytestmark = pytest.mark.slow
SCREEN, PHONE = 1400, 400
# A4 with the margins of the page's style, in dots: 186 mm.
PAPER = 703


def a_run(folders: Folders) -> Report:
    """With an explanation that was measured, a schedule, and memory by epoch."""
    run = folders.run(
        "one", msgspec.structs.replace(RECIPE, schedule=Schedule(name="cosine", warmup_steps=10)), count=300
    )
    measure(run)
    for rank in (0, 1):
        for each in run.epochs(rank):
            append_line(
                run.rank_folder(rank) / "epochs.jsonl", {**each, "memory_growth_bytes": 1_000_000 + each["epoch"]}
            )
    return report([of_runs([run])])


def made_once(folders: Folders) -> Report:
    """Two runs, and no interval of anything."""
    return report([of_runs([folders.run("one", placement=ALONE), folders.run("two", seconds=7.0)])])


def a_prediction(folders: Folders) -> Report:
    runs = compared(folders, 2)
    fit_for(runs[0])
    return report([of_runs(runs)])


def a_failure(folders: Folders) -> Report:
    return report([of_runs([folders.run("broken", state="failed")])])


def attached(folders: Folders) -> Report:
    run = folders.run("mine")
    spec = run.spec()
    plan = msgspec.structs.replace(spec.plan, steps_per_epoch=0)
    options = Options(attached=["python", "train.py"])
    write_atomic(
        run.folder / "run.json", msgspec.to_builtins(msgspec.structs.replace(spec, plan=plan, options=options))
    )
    for step in range(1, 41):
        append_line(
            run.rank_folder(0) / LOGGED_FILE, {"step": step, "time": 1e9 + step, "values": {"train_loss": 1 / step}}
        )
    return report([of_runs([run])])


def a_race(folders: Folders) -> Report:
    windows = made_up({"ranks=1": 1.0, "ranks=2 backend=shm": 0.6})
    return of_parts([race_part(raced(windows, ["ranks=1", "ranks=2 backend=shm"]), windows, "a-race")])


def a_starved_race(folders: Folders) -> Report:
    record, windows = starved_race()
    return of_parts([race_part(record, windows, "a-race")])


TORCHRUN = ["torchrun", "--nproc-per-node", "2", "a/folder/with/a/long/name/train_a_large_model.py", "--epochs", "3"]


def a_proof(folders: Folders) -> Report:
    many, one = script()
    verdict = Judge(many, one, one).verdict()
    assert verdict.verdict == SAME
    return of_parts([proof_part(verdict, TORCHRUN, "train.py")])


def a_proof_of_the_contrary(folders: Folders) -> Report:
    many, one = script(steps=40, wrong=3, times=2.0)
    return of_parts([proof_part(Judge(many, one, one).verdict(), TORCHRUN, "train.py")])


def nothing_proven(folders: Folders) -> Report:
    verdict = Judge(script()[0], None, None, "1 process: it ended with exit code 1").verdict()
    assert verdict.verdict == OPEN
    return of_parts([proof_part(verdict, TORCHRUN, "train.py")])


def tuned(folders: Folders) -> Report:
    others = [Otherwise(factor="ranks", words="ranks=1 threads=2", ratio=1.4, low=1.3, high=1.5)]
    found = Found(
        words=["ranks=2", "threads=1"],
        recipe=Recipe(),
        placement=Placement(),
        step_seconds=0.01,
        images_per_second=6400.0,
        default="ranks=1 threads=2",
        default_ratio=1.4,
        default_low=1.3,
        default_high=1.5,
        one_host=False,
        otherwise=others,
        races=["a", "b"],
        seconds=60.0,
    )
    return of_parts([tune_part(found, "lockstep run ranks=2 threads=1", "seconds")])


def a_study(name: str) -> Callable[[Folders], Report]:
    def make(folders: Folders) -> Report:
        found = unpack(house.ROOT / "docs/studies" / f"{name}.study.zip", folders.root)
        return report([of_study(StudyFolder(Path(found.folder)))])

    return make


PAGES: dict[str, Callable[[Folders], Report]] = {
    each.__name__: each
    for each in (
        a_run,
        made_once,
        a_prediction,
        a_failure,
        attached,
        a_race,
        a_starved_race,
        a_proof,
        a_proof_of_the_contrary,
        nothing_proven,
        tuned,
    )
} | {
    path.name.removesuffix(".study.zip"): a_study(path.name.removesuffix(".study.zip"))
    for path in sorted((house.ROOT / "docs/studies").glob("*.study.zip"))
}

OVER = """(most) => [...document.querySelectorAll('body *')].filter((one) => {
    const { width, right } = one.getBoundingClientRect();
    return width && right > most + 1 && !one.closest('.unseen, .skip, .scroll table');
}).map((one) => `${one.tagName} ${one.className} ${one.textContent.slice(0, 40)}`)"""
# What scrolls by itself may be wider; paper does not scroll.
OVER_PAPER = OVER.replace(", .scroll table", "")
OUTSIDE = """() => [...document.querySelectorAll('.drawing svg text')].filter((text) => {
    const [own, all] = [text.getBoundingClientRect(), text.closest('svg').getBoundingClientRect()];
    return own.left < all.left - 2 || own.right > all.right + 2;
}).map((text) => `${text.closest('figure').id}: ${text.textContent}`)"""


def fits(page: Any, width: int, over: str = OVER) -> None:
    """Plots are drawn anew for another width, so it is waited for."""
    page.set_viewport_size({"width": width, "height": 900})
    found: list[Any] = []

    def settled() -> bool:
        found[:] = [page.evaluate(over, width), page.evaluate(OUTSIDE)]
        return not any(found)

    try:
        wait_for(settled, 20, what=f"everything to fit {width} dots")
    except pytest.fail.Exception:
        pytest.fail(f"wider than {width}: {found[0][:5]}; outside of its plot: {found[1][:5]}")


def looks_right(page: Any) -> None:
    fits(page, SCREEN)
    sideways = "[...document.querySelectorAll('.scroll')].filter((one) => one.scrollWidth > one.clientWidth + 1).length"
    assert page.evaluate(sideways) == 0, "no table has to be scrolled on a screen"
    fits(page, PHONE)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    fits(page, PAPER, OVER_PAPER)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_no_error_and_fits_screen_phone_and_paper(
    name: str, browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = isolated(tmp_path, monkeypatch)
    folders.root.mkdir()
    found = PAGES[name](folders)
    path = tmp_path / "report.html"
    path.write_text(page_of(found), encoding="utf-8")
    with Opened(browser, path, SCREEN, all_drawn=any(part.charts for part in found.parts)) as opened:
        opened.page.wait_for_selector("section")
        charts = sum(len(part.charts) for part in found.parts)
        assert opened.page.locator("figure").count() == charts, "every chart of the document has a place on the page"
        looks_right(opened.page)
        assert opened.problems == []


LONG = "devices-a-student-with-a-very-long-name-of-many-words-and-no-blank-in-it-at-all.lab.zip"
GRADED = {
    "right": Graded(
        file="devices-ana.lab.zip",
        student="Ana Li",
        lab="devices",
        title="More ranks on one machine",
        marks=[
            Mark("speedup", "right", 5, 5, ["1.62, and the records say 1.58"]),
            Mark("essay", "by hand", 0, 10, ["Because each rank has a core of its own. " * 20]),
        ],
        tested={"one": True},
    ),
    "wrong": Graded(
        file=f"a/folder/{LONG}",
        student="A student <b>with</b> a name",
        lab="devices",
        title="More ranks on one machine",
        marks=[
            Mark(
                "a-task-whose-name-has-thirty-chars",
                "wrong",
                0,
                12.5,
                [f"runs/20260101-120200-{LONG}/ranks/0000/steps.bin: edited"],
            ),
            Mark("two", "missing", 0, 20, ["no run of this task was handed in"]),
            Mark("three", "not settled", 5, 5, ["the machine was too busy"]),
        ],
        flags=[f"its ledger is that of {LONG}", "it was made from another lab.toml than the one that grades it"],
        notes=[f"runs/{LONG} is not of this lab"],
        tested={"one": True, "two": False},
    ),
    "empty": Graded(file=LONG, student=LONG, lab="devices", flags=["no hand-in: it is no zip file"]),
}


@pytest.mark.parametrize("name", GRADED)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_students_page_has_no_error_and_fits_screen_phone_and_paper(
    name: str, scheme: str, browser: Any, tmp_path: Path
) -> None:
    lab_pages.write([GRADED[name]], tmp_path)
    (path,) = tmp_path.glob("*/page.html")
    with Opened(browser, path, SCREEN, scheme, all_drawn=False) as opened:
        assert opened.page.locator("tr").count() == 1 + len(GRADED[name].marks)
        assert opened.page.locator("b").count() == 0, "names stay text"
        looks_right(opened.page)
        assert opened.problems == []
        assert [url for url in opened.requests if url != path.as_uri()] == [], "it loads nothing"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        folders = isolated(tmp_path_factory.mktemp("views"), patch)
        folders.root.mkdir()
        a_study("scaling")(folders)
        folders.run("one", placement=ALONE)
        folders.run("two", seconds=7.0)
        live: Run = folders.run("live", state="running")
        live.write_status("running", supervisor_pid=os.getpid(), host=platform.node())
        opened = Served(folders.root)
        yield opened
        opened.end()


@pytest.mark.parametrize(
    ("path", "sign"),
    [
        ("/run?id=live", ".live figure[id='rate']"),  # first: after 30 s without a sign of life it is a stalled one
        ("/", ".runs tbody tr"),
        ("/run?id=two", "#main figure"),
        ("/study?id=scaling", "#main figure"),
        ("/compare?id=one&id=two", "#main figure"),
    ],
)
def test_a_page_of_the_dashboard_has_no_error_and_fits_screen_phone_and_paper(
    path: str, sign: str, browser: Any, served: Served
) -> None:
    served.problems.clear()
    page = served.page(browser, path, SCREEN)
    page.wait_for_selector(sign)
    drawn = "document.querySelectorAll('figure').length === document.querySelectorAll('figure [data-drawn] svg').length"
    wait_for(lambda: page.evaluate(drawn), what="all plots to be drawn")
    looks_right(page)
    page.context.close()
    assert served.problems == []
