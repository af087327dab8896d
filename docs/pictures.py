"""Makes the pictures of the pages from real runs: `.venv/bin/python docs/pictures.py` writes docs/race.svg and docs/pictures/*.

It takes a few minutes, needs Playwright and Chromium, and trains a small study in a folder that goes away. `race`, `charts`, `pages` and
`plots` make one kind alone; the first two need no browser.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parent
LOCKSTEP = str(Path(sys.executable).with_name("lockstep"))
MOST_BYTES = 200_000
WIDTH = 1000

# As rich's own, without the web font that it would fetch.
FORMAT = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: Menlo, Consolas, 'DejaVu Sans Mono', monospace; font-size: {char_height}px;
  line-height: {line_height}px; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{width}" height="{height}"/></clipPath>
{lines}</defs>
<rect fill="#161b22" x="1" y="1" width="{width}" height="{height}" rx="8"/>
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""

STUDY = """
about = "What a second core brings at the same recipe, and what the way of the exchange has to do with it."
baseline = "1 rank"
repeats = 3
metrics = ["seconds", "images_per_second", "accuracy", "memory"]
[recipe]
model = "mnist-convnet"
data = "mnist"
train_limit = 12000
global_batch = 128
epochs = 5
optimizer.lr = 1e-3
[placement]
threads = 1
[cells."1 rank"]
ranks = 1
[cells."2 ranks, gloo"]
ranks = 2
backend = "gloo"
[cells."2 ranks, shm"]
ranks = 2
backend = "shm"
"""


def main(words: list[str]) -> None:
    for name, make in (("race", race), ("charts", charts), ("pages", pages), ("plots", plots)):
        if not words or name in words:
            make()


def race() -> None:
    """A real one, as it ends at a terminal."""
    words = ["ranks=1", "ranks=2 backend=gloo", "ranks=2 backend=shm"]
    common = "threads=1 global_batch=128"
    with tempfile.TemporaryDirectory(prefix="lockstep-pictures-") as name:
        said = call(Path(name), "race", *words, "--all", common, "--name", "two-cores", COLUMNS="100")
    out = terminal(f"$ lockstep race {shlex.join(words)} --all {shlex.quote(common)}")
    out.print(Text(said.rstrip("\n")))
    out.save_svg(str(HERE / "race.svg"), code_format=FORMAT, title="lockstep race")


def charts() -> None:
    """Single plots of a run that was traced and explained, and of what an exchange costs."""
    words = ("data=mnist", "train_limit=12000", "global_batch=128", "epochs=1", "ranks=2", "threads=1")
    with tempfile.TemporaryDirectory(prefix="lockstep-pictures-") as name:
        folder = Path(name)
        call(folder, "run", *words, "--trace", "20", "--name", "traced", "--quiet")
        call(folder, "explain", "traced", "--measure", "--seconds", "10")
        call(folder, "report", "traced", "--format", "svg", "-o", "plots")
        for plot in ("timeline", "speed-up", "step-times"):
            shutil.copy(folder / "plots" / f"{plot}.svg", HERE / "pictures" / f"{plot}.svg")
        call(folder, "comms", "--collective", "all_reduce", "--plot", "comms.svg")
        shutil.copy(folder / "comms.svg", HERE / "pictures" / "comms.svg")


def terminal(command: str = "", width: int = 112) -> Console:
    out = Console(record=True, width=width, force_terminal=True, highlight=False, file=io.StringIO())
    if command:
        out.print(Text(command, style="bold"))
    return out


def pages() -> None:
    with tempfile.TemporaryDirectory(prefix="lockstep-pictures-") as name, chromium() as browser:
        folder = Path(name)
        (folder / "two-cores.toml").write_text(STUDY)
        call(folder, "study", "run", "two-cores.toml", "--quiet")
        runs = json.loads(call(folder, "runs", "--json", "--all"))
        last = next(run["id"] for run in reversed(runs) if "shm" in run["id"])
        call(folder, "explain", last, "--measure", "--seconds", "8")
        call(folder, "report", "two-cores", "-o", "report.html")
        for scheme, picture in (("light", "report"), ("dark", "report-dark")):
            page = new_page(browser, scheme, 1900)
            page.goto((folder / "report.html").as_uri())
            page.wait_for_selector("figure .plot svg")
            page.wait_for_timeout(3000)  # the other plots; the page's policy forbids to ask it from inside
            keep(page, picture)
        show(browser, call(folder, "show", last, "--plot", COLUMNS="100", FORCE_COLOR="1"))
        live(folder, browser)


def plots() -> None:
    """Single sections: the plots over a factor of a study that is kept here, and those over time of a run."""
    words = ("data=embedded", "epochs=12", "global_batch=64", "ranks=2", "threads=1", "schedule.name=cosine")
    with tempfile.TemporaryDirectory(prefix="lockstep-pictures-") as name, chromium() as browser:
        folder = Path(name)
        call(folder, "study", "unpack", str(HERE / "studies" / "batch-size.study.zip"))
        call(folder, "run", *words, "schedule.warmup_steps=100", "--name", "one", "--quiet")
        for about, section, picture in (("batch-size", "factor", "factor"), ("one", "pace", "over-time")):
            call(folder, "report", about, "-o", "report.html")
            page = new_page(browser, "light", 1900)
            page.goto((folder / "report.html").as_uri())
            page.wait_for_selector(f"#{section}")
            page.evaluate("dispatchEvent(new Event('beforeprint')); dispatchEvent(new Event('afterprint'))")
            page.wait_for_timeout(3000)
            keep(page, picture, f"#{section} .figures-grid")


def show(browser: Any, text: str) -> None:
    """What `lockstep show` prints at a terminal."""
    out = terminal("$ lockstep show last")
    out.print(Text.from_ansi(text))
    page = new_page(browser, "dark", 700)
    page.set_content(f'<body style="margin:0">{out.export_svg(code_format=FORMAT, title="lockstep show")}</body>')
    keep(page, "terminal", "svg")


def live(folder: Path, browser: Any) -> None:
    """A run under way, in the dashboard."""
    words = ("data=mnist", "train_limit=12000", "global_batch=128", "epochs=60", "ranks=2", "threads=1")
    training = subprocess.Popen([LOCKSTEP, "run", *words, "--quiet"], cwd=folder, env=environment())
    server = subprocess.Popen(
        [LOCKSTEP, "dashboard", "--port", "0", "--no-open", "--json"],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        text = ""
        while not text.endswith("}\n"):
            text += server.stdout.readline()
        page = new_page(browser, "light", 1530)
        page.goto(json.loads(text)["address"])
        page.locator(".state.running").first.wait_for(timeout=60_000)
        page.locator(".runs tbody a").first.click()
        page.locator("figure[id='accuracy']").wait_for(timeout=60_000)
        time.sleep(20)  # a few epochs to look at
        page.evaluate("document.querySelectorAll('details.cell').forEach((one) => { one.open = false; })")
        keep(page, "dashboard")
    finally:
        for process in (server, training):
            process.send_signal(signal.SIGINT)
            process.wait(60)


def call(folder: Path, *words: str, **more: str) -> str:
    return subprocess.run(
        [LOCKSTEP, *words], cwd=folder, env=environment(**more), stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def environment(**more: str) -> dict[str, str]:
    return {**{key: value for key, value in os.environ.items() if key != "LOCKSTEP_RUNS"}, **more}


@contextmanager
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    path = os.environ.get("LOCKSTEP_BROWSER") or shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def new_page(browser: Any, scheme: str, height: int) -> Any:
    return browser.new_context(viewport={"width": 1400, "height": height}, color_scheme=scheme).new_page()


def keep(page: Any, name: str, part: str | None = None) -> None:
    """As wide as a README shows it; in 256 colours where it would be too large else."""
    from PIL import Image

    data = page.locator(part).first.screenshot() if part else page.screenshot()
    path = HERE / "pictures" / f"{name}.png"
    path.parent.mkdir(exist_ok=True)
    with Image.open(io.BytesIO(data)) as picture:
        small = picture.convert("RGB").resize(
            (WIDTH, picture.height * WIDTH // picture.width), Image.Resampling.LANCZOS
        )
        small.convert("RGB").save(path, optimize=True)
        if path.stat().st_size > MOST_BYTES:  # fewer colours; large light areas may change theirs a little
            small.convert("RGB").quantize(256, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(
                path, optimize=True
            )
    size = path.stat().st_size
    print(f"{path.name}: {size / 1e3:.0f} kB")
    if size > MOST_BYTES:
        sys.exit(f"{path.name} is larger than {MOST_BYTES / 1e3:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
