"""The page in a real browser, opened from its file: it draws without an error, can be used with keys, and no name becomes markup."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from lockstep.report import tables
from lockstep.report.document import report
from lockstep.report.html import page as page_of
from lockstep.report.subject import of_names, of_runs
from lockstep.report.vega.common import palette
from lockstep.report.views import Report
from lockstep.run import Run, write_atomic
from lockstep.ways import BESIDE, FILE, Way
from support import wait_for
from test_report import ALONE, BOTH, HOSTILE, RECIPE, Folders, study_folder

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    """A study with a hostile cell, and a single run with a waterfall: every kind of plot."""
    folders = Folders(tmp_path_factory.mktemp("browser") / "runs")
    others = {
        f"cell {number}": (msgspec.structs.replace(RECIPE, global_batch=64 * number), BOTH) for number in range(1, 6)
    }
    study_folder(folders, {HOSTILE: (RECIPE, ALONE), **others}, 3)
    run = folders.run("one")
    measure(run)
    found = report([*of_names(["mine"], folders.root), of_runs([run])])
    path = folders.root / "report.html"
    path.write_text(page_of(found), encoding="utf-8")
    return path, found


def measure(run: Run) -> None:
    """As `lockstep explain --measure` leaves it."""
    names = ("data", "forward", "backward", "optimizer", "other", "total")
    parts = {**dict.fromkeys(names, 0.0), "exchange": 1e-3, "waiting": 5e-4}
    seconds = {
        "whole": (16e-3, 1),
        "plain": (9e-3, 1),
        "apart": (9.5e-3, 2),
        "together": (11.2e-3, 2),
        "no-data": (11e-3, 2),
    }
    ways = [
        Way(name=name, samples=32, ranks=ranks, threads=1, steps=5, rounds=[[time] * ranks] * 5, phases=[parts] * ranks)
        for name, (time, ranks) in seconds.items()
    ]
    beside = Run(run.folder / BESIDE)
    beside.folder.mkdir(parents=True)
    write_atomic(beside.folder / FILE, {"ways": msgspec.to_builtins(ways)})
    beside.write_status("done")


LINES = ".drawing g.mark-line.role-mark path"


class Opened:
    """A page that was opened, and everything that went wrong in it."""

    def __init__(
        self,
        browser: Any,
        path: Path,
        width: int = 1400,
        scheme: str = "light",
        all_drawn: bool = True,
        in_time: bool = False,
    ) -> None:
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, accept_downloads=True
        )
        self.page = self.context.new_page()
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.page.on(
            "console",
            lambda message: self.problems.append(message.text) if message.type in ("error", "warning") else None,
        )
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.problems.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url))
        if not in_time:  # only what is asked for is drawn
            self.page.add_init_script("window.requestIdleCallback = () => {}")
        self.page.goto(path.as_uri())
        if all_drawn:
            self.draw_all()

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def draw_all(self) -> None:
        """Plots are drawn when they come into sight, or to be printed."""
        self.page.wait_for_selector("figure")
        self.page.evaluate("dispatchEvent(new Event('beforeprint')); dispatchEvent(new Event('afterprint'))")
        # Not by the page's own function, which would have to be made from text: the policy forbids that.
        drawn = (
            "document.querySelectorAll('figure [data-drawn] svg').length === document.querySelectorAll('figure').length"
        )
        wait_for(lambda: self.page.evaluate(drawn), what="all plots to be drawn")

    def download(self, figure: str, button: str) -> bytes:
        with self.page.expect_download() as waiting:
            self.page.locator(f"figure[id='{figure}'] button", has_text=button).click()
        return Path(waiting.value.path()).read_bytes()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 400])
def test_every_view_is_drawn_without_an_error_and_fits(
    browser: Any, made: tuple[Path, Report], width: int, scheme: str
) -> None:
    path, found = made
    with Opened(browser, path, width, scheme) as opened:
        page = opened.page
        charts = [each.id for part in found.parts for each in part.charts]
        assert page.evaluate("[...document.querySelectorAll('figure')].map(f => f.id)") == charts
        assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing is wider than the window"
        # Marks that lie outside of their plot would be cut off or lie upon another.
        outside = page.evaluate(
            """() => [...document.querySelectorAll('.drawing svg text')].filter((text) => {
                const [own, all] = [text.getBoundingClientRect(), text.closest('svg').getBoundingClientRect()];
                return own.left < all.left - 2 || own.right > all.right + 2;
            }).map((text) => text.closest('figure').id + ': ' + text.textContent)"""
        )
        assert outside == []
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
        assert opened.problems == []
        assert [url for url in opened.requests if not url.startswith(("file:", "data:", "blob:"))] == []


def test_names_stay_text(browser: Any, made: tuple[Path, Report]) -> None:
    with Opened(browser, made[0], all_drawn=False) as opened:
        opened.page.wait_for_selector("main details.cell")
        assert opened.page.locator("img").count() == 0
        assert HOSTILE in opened.page.locator("main table.sortable th[scope=row]").all_text_contents()
        assert opened.problems == []


def test_the_table_sorts_and_filters(browser: Any, made: tuple[Path, Report]) -> None:
    path, found = made
    table = found.parts[0].table
    assert table is not None
    place = table.columns.index("training time")
    ordered = [row[0].text for row in sorted(table.rows, key=lambda row: row[place].value or 0.0)]
    with Opened(browser, path, all_drawn=False) as opened:
        page = opened.page
        names = "[...document.querySelectorAll('[id$=comparison] table.sortable tbody tr:not([hidden]) th')].map(th => th.firstChild.textContent)"
        assert page.evaluate(names) == [row[0].text for row in table.rows]
        head = page.locator("table.sortable thead th", has_text="training time")
        head.locator("button").press("Enter")
        assert page.evaluate(names) == ordered
        assert head.get_attribute("aria-sort") == "ascending"
        head.locator("button").press("Enter")
        assert page.evaluate(names) == ordered[::-1]
        page.locator("input[type=search]").fill("cell 3")
        assert page.evaluate(names) == ["cell 3"]


def test_plots_are_saved_with_their_data(browser: Any, made: tuple[Path, Report]) -> None:
    from PIL import Image

    path, found = made
    with Opened(browser, path, scheme="dark", all_drawn=False) as opened:
        for name in ("2-loss", "2-speed-up"):
            chart = next(each for part in found.parts for each in part.charts if each.id == name)
            saved = list(csv.reader(io.StringIO(opened.download(name, "CSV").decode(), newline="")))
            ours = list(csv.reader(io.StringIO(tables.csv_text(tables.data(chart)), newline="")))
            assert [[number(value) for value in row] for row in saved] == [
                [number(value) for value in row] for row in ours
            ]
        tree = ElementTree.fromstring(opened.download("2-loss", "SVG"))
        assert {"Loss", "test", "train"} <= {node.text for node in tree.iter() if node.tag.endswith("text")}
        assert tree[0].get("fill") == "#ffffff", "white paper, also from a dark page"
        assert "var(" not in ElementTree.tostring(tree, encoding="unicode")
        with Image.open(io.BytesIO(opened.download("2-loss", "PNG"))) as picture:
            assert picture.width == 2 * int(tree.get("width") or 0)
            assert len(picture.convert("RGB").getcolors(1 << 24) or []) > 20
        assert opened.problems == []


def number(value: str) -> Any:
    try:
        return float(value)
    except ValueError:
        return value


def test_a_plot_is_read_and_switched_with_the_keyboard(browser: Any, made: tuple[Path, Report]) -> None:
    with Opened(browser, made[0], all_drawn=False) as opened:
        figure = opened.page.locator("figure[id='2-loss']")
        figure.scroll_into_view_if_needed()
        figure.locator("[data-drawn] svg").wait_for()
        assert figure.locator(LINES).count() == 2
        figure.locator(".plot").focus()
        for _ in range(2):
            opened.page.keyboard.press("ArrowRight")
        said = figure.locator("[role=status]").text_content()
        assert said is not None
        assert said.startswith("epoch 2: ")
        assert "test 0.5600" in said
        assert "train 0.5000 (0.4950–0.5050)" in said
        figure.locator("label", has_text="ranks").click()
        assert figure.locator(LINES).count() == 4
        figure.locator("button.key", has_text="test").press("Enter")
        assert figure.locator("button.key", has_text="test").get_attribute("aria-pressed") == "false"
        assert figure.locator(LINES).count() == 3
        for name in ("train", "rank 0", "rank 1"):
            figure.locator("button.key", has_text=name).click()
        assert not figure.locator(".drawing").is_visible(), "an empty plot says nothing"
        figure.locator("button.key", has_text="train").click()
        assert figure.locator(LINES).count() == 1
        figure.locator("button", has_text="Data").click()
        assert figure.locator(".data tbody tr").count() == 40
        assert opened.problems == []


def test_it_prints_in_light_with_all_findings_open(browser: Any, made: tuple[Path, Report]) -> None:
    with Opened(browser, made[0], scheme="dark", all_drawn=False) as opened:
        opened.page.evaluate("dispatchEvent(new Event('beforeprint'))")
        opened.page.emulate_media(media="print")
        assert opened.page.evaluate("document.documentElement.dataset.theme") == "light"
        assert opened.page.evaluate("[...document.querySelectorAll('details.cell')].every(one => one.open)")
        assert not opened.page.locator("nav").is_visible()


def test_a_page_is_printed_with_all_its_plots(browser: Any, made: tuple[Path, Report]) -> None:
    with Opened(browser, made[0], all_drawn=False) as opened:
        opened.page.locator("figure").first.scroll_into_view_if_needed()
        opened.page.locator("figure [data-drawn] svg").first.wait_for()
        assert opened.page.locator("figure [data-drawn]").count() < opened.page.locator("figure").count()
        opened.page.pdf()
        assert opened.page.locator("figure [data-drawn]").count() == opened.page.locator("figure").count()


def test_plots_are_drawn_when_they_come_into_sight_and_else_when_there_is_time(
    browser: Any, made: tuple[Path, Report]
) -> None:
    with Opened(browser, made[0], width=400, all_drawn=False) as opened:
        first, last = opened.page.locator("figure").first, opened.page.locator("figure").last
        first.scroll_into_view_if_needed()
        first.locator("[data-drawn] svg").wait_for()
        assert last.locator("svg").count() == 0
        last.scroll_into_view_if_needed()
        last.locator("[data-drawn] svg").wait_for()
        assert opened.problems == []
    with Opened(browser, made[0], width=400, all_drawn=False, in_time=True) as opened:
        opened.page.locator("figure").last.locator("[data-drawn] svg").wait_for(state="attached")
        assert opened.page.evaluate("scrollY") == 0


def test_a_plot_takes_on_the_theme_the_width_and_new_data(browser: Any, made: tuple[Path, Report]) -> None:
    with Opened(browser, made[0], all_drawn=False) as opened:
        page, figure = opened.page, opened.page.locator("figure[id='2-loss']")
        figure.scroll_into_view_if_needed()
        figure.locator("[data-drawn] svg").wait_for()
        stroke = "[...document.querySelectorAll(\"figure[id='2-loss'] g.mark-line.role-mark path\")][0].getAttribute('stroke')"
        light, dark = palette("light"), palette("dark")
        assert page.evaluate(stroke) == light["c0"]
        button = page.locator("header button", has_text="Theme")
        for theme, colours in (("light", light), ("dark", dark)):
            button.click()
            assert page.evaluate("document.documentElement.dataset.theme") == theme
            assert page.evaluate(stroke) == colours["c0"]
        page.set_viewport_size({"width": 700, "height": 900})
        fits = """() => {
            const plot = document.getElementById('2-loss').querySelector('.drawing');
            return Math.abs(plot.clientWidth - plot.querySelector('svg').clientWidth) < 2;
        }"""
        wait_for(lambda: page.evaluate(fits), what="the plot to be as wide as its place")
        # As the dashboard does it: the same chart with one more epoch.
        page.evaluate(
            """() => {
                const report = JSON.parse(document.getElementById('document').textContent);
                const chart = report.parts[1].charts.find((one) => one.id === '2-loss');
                for (const one of chart.series) { one.x.push(11); one.y.push(0.75); if (one.low) { one.low.push(0.7); one.high.push(0.8); } }
                document.getElementById('2-loss').update(chart);
            }"""
        )
        figure.locator(".plot").focus()
        for _ in range(11):
            page.keyboard.press("ArrowRight")
        said = figure.locator("[role=status]").text_content() or ""
        assert said.startswith("epoch 11: ")
        assert "test 0.7500" in said
        points = f"document.querySelector(\"figure[id='2-loss'] {LINES}\").getAttribute('d').split('L').length"
        assert page.evaluate(points) == 11
        assert opened.problems == []


def test_a_tip_shows_a_hostile_name_as_text(browser: Any, made: tuple[Path, Report]) -> None:
    with Opened(browser, made[0], all_drawn=False) as opened:
        plot = opened.page.locator("figure[id='1-trade-off'] .plot")
        plot.scroll_into_view_if_needed()
        plot.locator("[data-drawn] svg").wait_for()
        plot.focus()
        names = []
        for _ in range(6):
            opened.page.keyboard.press("ArrowRight")
            names.append(plot.locator(".tip strong").text_content())
        assert HOSTILE in names
        assert opened.page.locator("img").count() == 0
        assert opened.problems == []


def test_the_reader_chooses_the_axis_and_the_smoothing(browser: Any, made: tuple[Path, Report]) -> None:
    path, found = made
    chart: Any = next(each for part in found.parts for each in part.charts if each.id == "2-loss-by-step")
    with Opened(browser, path, all_drawn=False) as opened:
        page, figure = opened.page, opened.page.locator("figure[id='2-loss-by-step']")
        figure.scroll_into_view_if_needed()
        figure.locator("[data-drawn] svg").wait_for()
        assert figure.locator(LINES).count() == 1
        assert figure.locator("select option").all_text_contents() == ["step", "samples", "training time", "epochs"]
        figure.locator("select").select_option("training time")
        title = "[...document.querySelectorAll(\"figure[id='2-loss-by-step'] .role-axis-title text\")].map((one) => one.textContent)"
        wait_for(lambda: "training time, ms" in page.evaluate(title), what="the other axis")

        def said(place: int) -> str:
            figure.locator(".plot").focus()
            page.keyboard.press("Escape")
            for _ in range(place):
                page.keyboard.press("ArrowRight")
            return str(figure.locator("[role=status]").text_content())

        assert said(20) == "training time 40.0\u00a0ms: loss 0.05000", "the 20th step ends after 20 x 2 ms"
        figure.locator("input[type=range]").press("ArrowRight")
        assert figure.locator("output").text_content() == "3 points"
        wait_for(lambda: figure.locator(LINES).count() == 2, what="the values behind the line")
        means = sum(chart.series[0].y[place] for place in (18, 19, 20)) / 3
        assert said(20) == f"training time 40.0\u00a0ms: loss {means:.5f}"
        assert "mean of 3 points" in (figure.locator(".says").text_content() or "")
        saved = list(csv.reader(io.StringIO(opened.download("2-loss-by-step", "CSV").decode(), newline="")))
        assert saved[0][1] == "training time (s)"
        assert float(saved[20][2]) == chart.series[0].y[19], "a file has what was measured"
        figure.locator("select").select_option("step")
        figure.locator("input[type=range]").press("ArrowLeft")
        wait_for(lambda: figure.locator(LINES).count() == 1, what="the line as it was")
        # An axis that a mark has no place on does not show it; the plots of a study have one along epochs alone.
        loss = page.locator("figure[id='1-loss']")
        loss.scroll_into_view_if_needed()
        loss.locator("[data-drawn] svg").wait_for()
        assert loss.locator(".drawing text", has_text="overfitting").count() == 1
        loss.locator("select").select_option("samples")
        wait_for(lambda: not loss.locator(".drawing text", has_text="overfitting").count(), what="the mark to go")
        assert opened.problems == []
