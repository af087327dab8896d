"""Ten thousand runs in the dashboard: how long until a browser has painted the list, and how much memory the server has taken."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import ours
from benchmarks.processes import ContenderFailed, environment
from benchmarks.record import Section
from benchmarks.rounds import Span, interleave
from benchmarks.sections.listing import QUICK, RUNS, _fill
from benchmarks.settings import Settings

REPEATS = 10
TARGET_MB = 150.0
LOOKED_AT_S = 30.0
PAINTED = "performance.getEntriesByType('paint').find((one) => one.name === 'first-contentful-paint')?.startTime"
ROWS = ".runs tbody tr"


class Dashboard:
    """A server in a process of its own."""

    def __init__(self, root: Path) -> None:
        words = [ours.executable(), "dashboard", "--runs", str(root), "--port", "0", "--no-open", "--json"]
        self.process = subprocess.Popen(words, env=environment(None), stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        text = ""
        while not text.endswith("}\n"):
            line = self.process.stdout.readline()
            if not line:
                raise ContenderFailed("the dashboard did not start")
            text += line
        self.address: str = json.loads(text)["address"]

    def memory_mb(self, key: str) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(f"{key}:")) / 1024

    def cpu(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        self.process.terminate()
        self.process.communicate()


@contextmanager
def chromium() -> Iterator[Any]:
    path = os.environ.get("LOCKSTEP_BROWSER") or shutil.which("chromium") or shutil.which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise ContenderFailed("needs Playwright: pip install playwright") from None
    if path is None:
        raise ContenderFailed("needs a browser: apt-get install chromium, or LOCKSTEP_BROWSER=path")
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def measure(settings: Settings) -> Section:
    count = QUICK if settings.quick else RUNS
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder, chromium() as browser:
        root = Path(folder)
        _fill(root, count)
        time.sleep(1.5)  # what has just changed is not in the index yet
        server = Dashboard(root)
        try:
            _look(browser, server)  # makes the index, and fills the browser's caches
            contenders = {
                "first paint": lambda: _look(browser, server, painted=True),
                "rows drawn": lambda: _look(browser, server),
                "rows drawn, from the command on": lambda: _from_the_command(browser, root),
            }
            outcome = interleave("dashboard", contenders, 3 if settings.quick else REPEATS, settings.seed)
            used, share = _watch(browser, server, 3.0 if settings.quick else LOOKED_AT_S)
            peak = server.memory_mb("VmHWM")
        finally:
            server.end()
    section = Section("dashboard", f"{count:,} runs in the dashboard", "page", "milliseconds", outcome.measurements)
    for name, reason in outcome.failures.items():
        section.refuse(f"{name} failed: {reason}")
    section.notes += [
        "Target: first paint under 1,000 ms. First paint is the browser's own figure (first contentful paint); rows drawn is seen from outside, "
        "the driver's overhead and all. CPU time is the server's.",
        f"Memory of the server after all of this: {used:.0f} MB, at most {peak:.0f} MB (target: under {TARGET_MB:.0f} MB): "
        + ("met." if peak < TARGET_MB else "missed."),
        f"While a page with the list is open, the server uses {share:.1%} of one core.",
    ]
    return section


def _look(browser: Any, server: Dashboard, painted: bool = False) -> Span:
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    try:
        page = context.new_page()
        cpu, wall = server.cpu(), time.perf_counter()
        page.goto(server.address, wait_until="commit")
        page.wait_for_selector(ROWS)
        took = time.perf_counter() - wall
        if painted:
            page.wait_for_function(PAINTED)
            took = page.evaluate(PAINTED) / 1000
        return Span(1, took, server.cpu() - cpu, {})
    finally:
        context.close()


def _from_the_command(browser: Any, root: Path) -> Span:
    wall = time.perf_counter()
    server = Dashboard(root)
    try:
        _look(browser, server)
        return Span(1, time.perf_counter() - wall, server.cpu(), {})
    finally:
        server.end()


def _watch(browser: Any, server: Dashboard, seconds: float) -> tuple[float, float]:
    """Memory and the share of a core while somebody looks at the list."""
    page = browser.new_page()
    page.goto(server.address)
    page.wait_for_selector(ROWS)
    cpu, began = server.cpu(), time.perf_counter()
    page.wait_for_timeout(1000 * seconds)
    share = (server.cpu() - cpu) / (time.perf_counter() - began)
    page.close()
    return server.memory_mb("VmRSS"), share
