"""The dashboard in a real browser: drawn without an error, live, sorted and filtered, with keys; no name becomes markup; a real run is stopped."""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lockstep.dashboard.server import Server
from lockstep.run import Run
from support import SHORT, Cli, processes_of, wait_for
from test_dashboard_server import HOSTILE
from test_report import ALONE, BOTH, RECIPE, Folders, isolated, study_folder

pytestmark = pytest.mark.slow

NAMES = "[...document.querySelectorAll('.runs tbody th')].map(th => th.textContent)"


def until(page: Any, expression: str) -> None:
    """Asked from here again and again: the page's policy forbids the browser's driver to do so by itself."""
    wait_for(lambda: page.evaluate(expression), what=expression)


def seen(page: Any, figure: str) -> bytes:
    """A plot as it is painted now; it may be replaced at any moment, so the place is looked at and not the element."""
    place = f"(({{x, y, width, height}}) => ({{x, y, width, height}}))(document.getElementById('{figure}').getBoundingClientRect())"
    picture: bytes = page.screenshot(clip=page.evaluate(place))
    return picture


class Served:
    """A server of a folder of runs, and pages of it with all that went wrong in them."""

    def __init__(self, root: Path) -> None:
        self.server = Server(root, "127.0.0.1", 0)
        self.thread = threading.Thread(target=self.server.serve)
        self.thread.start()
        self.base = f"http://127.0.0.1:{self.server.server_port}"
        self.problems: list[str] = []

    def end(self) -> None:
        self.server.shutdown()
        self.thread.join()

    def page(self, browser: Any, path: str = "/", width: int = 1400, scheme: str = "light") -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page = context.new_page()
        page.on("console", lambda said: self.problems.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("dialog", lambda dialog: (self.problems.append(dialog.message), dialog.dismiss()))
        page.goto(path if path.startswith("http") else self.base + path)
        return page


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        folders = isolated(tmp_path_factory.mktemp("dashboard"), patch)
        study_folder(folders, {HOSTILE: (RECIPE, ALONE), "two": (RECIPE, BOTH)}, 2)
        for number in range(60):
            folders.run(
                f"plain-{number:02d}",
                msgspec.structs.replace(RECIPE, seed=100 + number),
                ALONE,
                float((number * 7) % 60 + 1),
            )
        folders.run(HOSTILE, msgspec.structs.replace(RECIPE, seed=999))
        broken = folders.run("broken", msgspec.structs.replace(RECIPE, seed=998), state="failed")
        (broken.rank_folder(1) / "log.txt").write_text("<script>alert(2)</script>\nout of memory\n")
        opened = Served(folders.root)
        yield opened
        opened.end()


@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (400, "dark")])
def test_every_page_is_drawn_without_an_error_and_fits(browser: Any, served: Served, width: int, scheme: str) -> None:
    served.problems.clear()
    for path, sign in (
        ("/", ".runs tbody tr"),
        ("/run?id=plain-01", "#main figure"),
        ("/run?id=broken", "#main .finding"),
        ("/study?id=mine", "#main figure"),
        ("/compare?id=plain-01&id=broken&id=plain-03", "#main figure"),
    ):
        page = served.page(browser, path, width, scheme)
        page.wait_for_selector(sign)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{path} is wider than the window"
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
        assert page.locator(".reading:visible").count() == 0
        page.context.close()
    assert served.problems == []


def test_names_and_logs_stay_text(browser: Any, served: Served) -> None:
    served.problems.clear()
    page = served.page(browser)
    page.locator(".runs a", has_text="onerror").click()
    page.wait_for_selector("#main figure")
    assert page.locator("h1").first.text_content() == HOSTILE
    assert page.locator("img").count() == 0
    page.goto(f"{served.base}/run?id=broken")
    page.get_by_label("Whose log").select_option("1")
    until(page, "document.querySelector('.log').textContent.includes('out of memory')")
    assert "<script>alert(2)</script>" in page.locator(".log").text_content()
    page.goto(f"{served.base}/study?id=mine")
    page.wait_for_selector("#main figure")
    assert page.locator("img").count() == 0
    page.context.close()
    assert served.problems == []


def test_the_list_sorts_filters_and_turns_pages_with_keys(browser: Any, served: Served) -> None:
    served.problems.clear()
    page = served.page(browser)
    page.wait_for_selector(".runs tbody tr")
    assert page.evaluate(NAMES)[:2] == [HOSTILE, "broken"], "newest first"
    page.locator(".pager button", has_text="next").press("Enter")
    until(page, "document.querySelectorAll('.runs tbody tr').length === 16")
    head = page.locator(".runs thead th", has_text="training time")
    head.locator("button").press("Enter")
    until(page, "document.querySelector('.runs tbody th').textContent === 'plain-00'")  # the best first
    assert head.get_attribute("aria-sort") == "ascending"
    head.locator("button").press("Enter")
    until(page, "document.querySelector('.runs tbody th').textContent === 'plain-17'")  # 7 * 17 % 60 + 1 = 60
    head.locator("button").press("Enter")
    page.locator("input[type=search]").fill("plain-3")
    until(page, "document.querySelectorAll('.runs tbody tr').length === 10")
    assert page.evaluate(NAMES) == sorted(page.evaluate(NAMES), key=lambda name: int(name[6:]) * 7 % 60)
    page.reload()
    until(page, "document.querySelectorAll('.runs tbody tr').length === 10")
    page.locator("input[type=search]").fill("")
    page.locator(".group", has_text="failed").press("Enter")
    until(page, "document.querySelectorAll('.runs tbody tr').length === 1")
    assert page.evaluate(NAMES) == ["broken"]
    page.context.close()
    assert served.problems == []


def test_ticked_runs_are_compared(browser: Any, served: Served) -> None:
    served.problems.clear()
    page = served.page(browser, "/?words=plain-0&sort=id&down=0")
    for name in ("plain-01", "plain-04"):
        page.get_by_label(f"Compare {name}").check()
    page.locator("input[type=search]").fill("plain-5")
    page.get_by_label("Compare plain-55").check()
    page.locator("a.action", has_text="Compare 3 runs").click()
    page.wait_for_selector("#main figure")
    assert page.locator("h1").first.text_content() == "3 runs"
    assert page.url.endswith("/compare?id=plain-01&id=plain-04&id=plain-55")
    page.context.close()
    assert served.problems == []


def test_a_new_run_appears_in_the_list(browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = isolated(tmp_path, monkeypatch)
    folders.root.mkdir()
    served = Served(folders.root)
    try:
        page = served.page(browser)
        assert "no runs here yet" in page.locator(".empty").text_content()
        run = folders.run("late", state="running")
        run.write_status("running", supervisor_pid=os.getpid(), host=platform.node())
        until(page, "document.querySelectorAll('.runs tbody tr').length === 1")
        assert page.locator(".runs .state").text_content() == "●running"
        run.write_status("done")
        until(page, "document.querySelector('.runs .state').textContent === '✓done'")
        page.context.close()
        assert served.problems == []
    finally:
        served.end()


@pytest.mark.cold
def test_a_real_run_moves_its_curves_and_is_stopped(browser: Any, cli: Cli) -> None:
    words = [word for word in SHORT if not word.startswith("epochs=")]
    started = cli.start("run", *words, "epochs=3000", "ranks=2", "--name", "real", "--quiet")
    run = Run(cli.runs / "real")
    wait_for(lambda: run.recorded_status()["state"] == "running", what="the run to start")
    served = Served(cli.runs)
    try:
        # Without the token in the address: it is asked for.
        page = served.page(browser, "/run?id=real")
        plot = page.locator("figure[id='loss-by-step']")
        plot.wait_for()
        page.wait_for_selector("#main section")
        assert page.locator("figure[id='loss-by-step']").count() == 1, "live, and not in the report as well"
        before = seen(page, "loss-by-step")
        page.locator("figure[id='accuracy']").wait_for()
        wait_for(lambda: seen(page, "loss-by-step") != before, what="the curve to move")
        assert page.locator(".ranks li").count() == 2
        page.locator("button.danger", has_text="Stop …").click()
        page.locator("dialog input").fill("wrong")
        page.locator("dialog button.danger").click()
        page.locator("dialog .problem", has_text="wrong token").wait_for()
        assert started.poll() is None
        # The browser itself notes the refusal on its console; that is no error of the page.
        assert [said for said in served.problems if "403" not in said] == []
        served.problems.clear()
        page.locator("dialog input").fill(served.server.app.guard.token)
        page.locator("dialog button.danger").click()
        out, err = started.communicate(timeout=30)
        assert started.returncode == 130, (out, err)
        page.locator(".strip .state.cancelled").wait_for()
        page.locator("#main figure[id='loss-by-step']").wait_for()
        assert run.recorded_status()["state"] == "cancelled"
        assert processes_of(run.folder) == []
        assert len(run.epochs()) > 0, "what was measured is kept"
        page.context.close()
        assert served.problems == []
    finally:
        served.end()
        if started.poll() is None:
            started.kill()
            started.wait()


def test_the_token_of_the_address_leaves_the_address_bar(browser: Any, served: Served) -> None:
    page = served.page(browser, served.server.address)
    page.wait_for_selector(".runs tbody tr")
    assert page.url == f"{served.base}/"
    assert page.evaluate("localStorage.getItem('lockstep-token')") == served.server.app.guard.token
    page.context.close()


def test_a_plot_that_is_being_read_is_left_alone(browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = isolated(tmp_path, monkeypatch)
    run = folders.run("live", state="running", count=30)
    run.write_status("running", supervisor_pid=os.getpid(), host=platform.node())
    served = Served(folders.root)
    try:
        page = served.page(browser, "/run?id=live")
        figure = page.locator("#live figure[id='loss-by-step']")
        points = (
            "document.querySelector('figure[id=\"loss-by-step\"] g.mark-line path').getAttribute('d').split('L').length"
        )
        figure.locator("[data-drawn] svg").wait_for()
        figure.hover()
        more = Folders(tmp_path / "more").run("more", count=60)
        for rank in (0, 1):
            (run.rank_folder(rank) / "steps.bin").write_bytes((more.rank_folder(rank) / "steps.bin").read_bytes())
        until(page, "document.querySelector('figure[id=\"loss-by-step\"]').dataset.newer === 'waits'")
        assert page.evaluate(points) == 30
        page.mouse.move(1, 1)
        until(page, f"{points} === 60")
        page.context.close()
        assert served.problems == []
    finally:
        served.end()
