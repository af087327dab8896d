"""What is made of a report's document: the page, Markdown, CSV, pictures, plots of characters; and the command."""

from __future__ import annotations

import base64
import csv
import gzip
import hashlib
import io
import itertools
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from lockstep.cli.report import command
from lockstep.errors import LockstepError
from lockstep.placement import Placement
from lockstep.recipe import Optimizer, Recipe
from lockstep.report import steps, tables, timeline
from lockstep.report.document import report
from lockstep.report.html import page
from lockstep.report.markdown import markdown
from lockstep.report.subject import of_names, of_runs
from lockstep.report.vega import bundle, files
from lockstep.report.views import Report
from lockstep.units import span, text
from support import SHORT, Cli
from test_report import ALONE, BOTH, EPOCHS, HOSTILE, RECIPE, Folders, compared, isolated, study_folder


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folders:
    return isolated(tmp_path, monkeypatch)


def large_study(folders: Folders) -> Report:
    """50 runs, 20 epochs, 4 ranks each, 2,000 steps."""
    places = [
        Placement(ranks=4, threads=1, launcher="spawn", device="cpu", backend="gloo", strategy=s)
        for s in ("ddp", "flat", "naive")
    ]
    cells = {
        f"cell {number}": (
            Recipe(data="embedded", global_batch=64, epochs=20, optimizer=Optimizer(lr=1e-3 / (number + 1))),
            places[number % 3],
        )
        for number in range(10)
    }
    study_folder(folders, cells, 5, count=2000)
    return report(of_names(["mine"], folders.root))


def test_fifty_runs_make_a_page_of_less_than_a_megabyte(folders: Folders) -> None:
    found = large_study(folders)
    assert dict(found.parts[0].facts)["runs done"] == "50 of 50"
    everywhere, *cells = found.parts[0].findings
    assert (everywhere.name, everywhere.findings[0].question) == ("every cell", "straggler")
    assert cells
    assert all("straggler" not in [said.question for said in about.findings] for about in cells)
    assert len(page(found).encode()) < 1_000_000


# ---------------------------------------------------------------- the page


class Seen(HTMLParser):
    """What a browser's parser would find: elements, attributes, and the text of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": [], "title": []}
        self._in = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self._in = tag

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in in self.texts:
            self.texts[self._in].append(data)


def without_specs(document: dict[str, Any]) -> dict[str, Any]:
    for part in document["parts"]:
        for chart in part["charts"]:
            del chart["spec"]
            chart.pop("narrow", None)
    return document


def test_hostile_names_stay_text(folders: Folders) -> None:
    study_folder(folders, {HOSTILE: (RECIPE, ALONE), "two": (RECIPE, BOTH)}, 2)
    run = folders.run("<b>{{document}} & {{style}}", environment={"note": HOSTILE})
    plain = Seen(page(report([of_runs([folders.run("plain")])])))
    found = report([*of_names(["mine"], folders.root), of_runs([run])])
    seen = Seen(page(found))
    assert seen.tags == plain.tags, "no name has become an element"
    assert not [name for name, _ in seen.attributes if name.startswith("on")]
    document, *_ = seen.texts["script"]
    assert without_specs(json.loads(document)) == json.loads(msgspec.json.encode(found))
    assert not re.search("[<>&\u2028\u2029]", document)
    assert seen.texts["title"] == ["mine, <b>{{document}} & {{style}} – Lockstep report"]
    assert HOSTILE in [row[0]["text"] for row in json.loads(document)["parts"][0]["table"]["rows"]]


def test_hostile_names_stay_text_in_markdown_and_pictures(folders: Folders) -> None:
    study_folder(folders, {HOSTILE + "|": (RECIPE, ALONE), "two": (RECIPE, BOTH)}, 2)
    found = report(of_names(["mine"], folders.root))
    words = markdown(found)
    assert "<img" not in words.replace("\\<img", "")
    rows = [row for row in words.splitlines() if row.startswith("| \\</script")]
    assert rows
    columns = len(found.parts[0].table.columns) if found.parts[0].table else 0
    assert len(re.split(r"(?<!\\)\|", rows[0])) == columns + 2
    for each in found.parts[0].charts:
        assert ElementTree.fromstring(files.svg(each)).tag == "{http://www.w3.org/2000/svg}svg"


def test_the_page_holds_all_it_needs_and_its_policy_allows_nothing_else(folders: Folders) -> None:
    text = page(report([of_runs([folders.run("one")])]))
    seen = Seen(text)
    policy = dict(seen.attributes)["content"] or ""
    policy = next(
        value or "" for name, value in seen.attributes if name == "content" and "default-src" in (value or "")
    )
    _, packed, script = seen.texts["script"]
    library = gzip.decompress(base64.b64decode(packed)).decode()
    digests = [
        f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
        for content in (seen.texts["style"][0], script, library)
    ]
    assert f"style-src {digests[0]}; script-src {digests[1]} {digests[2]};" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not {"link", "img", "iframe"} & set(seen.tags)
    assert "src" not in dict(seen.attributes)
    assert not re.findall(r"https?://[^\s\"']+", text)
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|fetch\(|XMLHttpRequest|WebSocket", script
    )


def test_every_colour_is_there_in_light_and_in_dark(folders: Folders) -> None:
    style = Seen(page(report([of_runs([folders.run("one")])]))).texts["style"][0]
    light, dark = (set(re.findall(r"--([\w-]+):", block)) for block in style.split("}")[:2])
    assert light == dark
    used = {*steps.NAMES, *timeline.PARTS, *(f"c{number}" for number in range(8))}
    assert used | {f"on-{name}" for name in timeline.PARTS} <= light


# How people see who lack one kind of cone, in linear RGB: Machado, Oliveira and Fernandes, 2009.
SIGHT = {
    "all": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "no red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "no blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def linear(code: str) -> np.ndarray[Any, Any]:
    share = np.array([int(code[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """CIELAB, in which a distance of about 2.3 is just seen."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(rgb, 0, 1) / np.array([0.95047, 1, 1.08883])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(one: str, other: str) -> float:
    """As WCAG defines it."""
    bright, dark = sorted((float(linear(code) @ [0.2126, 0.7152, 0.0722]) for code in (one, other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_colours_are_told_apart_by_colour_blind_readers_and_texts_can_be_read(theme: int) -> None:
    style = (Path(steps.__file__).parent / "page" / "page.css").read_text()
    code = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", style.split("}")[theme]))
    for names in ([f"c{number}" for number in range(8)], timeline.PARTS):
        for sight, matrix in SIGHT.items():
            seen = {name: lab(np.array(matrix) @ linear(code[name])) for name in names}
            for one, other in itertools.combinations(names, 2):
                assert np.linalg.norm(seen[one] - seen[other]) > 10, (sight, one, other)
    assert all(contrast(code[f"c{number}"], code["page"]) > 3 for number in range(8))
    assert all(
        contrast(code[name], code[ground]) > 4
        for name in ("ink", "muted", "faint", "warn")
        for ground in ("page", "panel")
    )
    assert all(contrast(code[name], code[f"on-{name}"]) > 4.5 for name in timeline.PARTS)


# ---------------------------------------------------------------- for papers


def test_the_data_of_every_plot_is_a_table(folders: Folders) -> None:
    found = report([of_runs(compared(folders, 2))])
    rows = {
        each.id: list(csv.reader(io.StringIO(tables.csv_text(tables.data(each))))) for each in found.parts[0].charts
    }
    assert rows["accuracy"][0] == ["series", "epoch", "accuracy (share of 1)", "low", "high", "point"]
    tested = [row for row in rows["accuracy"] if row[0].endswith("adam, ranks=2, strategy=ddp, test")]
    want = [Folders.epoch(epoch, 1.0, 0.9)["test_accuracy"] for epoch in range(1, EPOCHS + 1)]
    assert [float(row[2]) for row in tested] == pytest.approx(want, rel=1e-5)
    assert rows["trade-off"][0][1] == "training time (s)"
    assert {len(row) for row in rows["step"]} == {1 + len(steps.NAMES)}


def test_numbers_are_written_with_units_of_a_fitting_size() -> None:
    written = [
        text(1.6e-3, "seconds"),
        text(12.345, "seconds"),
        text(9e-7, "seconds"),
        text(1048576, "binary"),
        text(5.25e7, "bytes"),
    ]
    assert written == ["1.60 ms", "12.3 s", "0.900 µs", "1.00 MiB", "52.5 MB"]
    assert [text(0.97775, "percent"), text(1.6, "times"), text(11445.1, "rate"), text(None, "seconds")] == [
        "97.78 %",
        "1.60×",
        "11,445 samples/s",
        "–",
    ]
    assert span(0.0102, 0.00998, 0.0104, "seconds") == "10.2 ms (9.98–10.4)"


# ---------------------------------------------------------------- the command


def fails(*words: str) -> str:
    result = CliRunner().invoke(command, list(words))
    assert isinstance(result.exception, LockstepError), result.output
    assert result.exception.exit_code == 2
    return str(result.exception)


def test_what_cannot_be_written(folders: Folders, tmp_path: Path) -> None:
    folders.run("one")
    root = ["--runs", str(folders.root)]
    assert "its ending says no format" in fails("one", *root, "-o", str(tmp_path / "report.xyz"))
    assert "there is no folder" in fails("one", *root, "-o", str(tmp_path / "nowhere/report.html"))
    assert "is a folder already" in fails("one", *root, "--format", "html", "-o", str(tmp_path))
    assert "--format svg needs -o" in fails("one", *root, "--format", "svg")
    assert "no run 'two'" in fails("two", *root, "-o", str(tmp_path / "report.html"))


def test_a_report_needs_no_torch(folders: Folders, tmp_path: Path) -> None:
    """A laptop that looks at a cluster's runs has none."""
    compared(folders, 1)
    bundle.bundle()
    out = tmp_path / "report.html"
    code = "import sys; sys.modules['torch'] = None\nfrom lockstep.cli.report import command\ncommand()"
    names = [str(path) for path in folders.root.iterdir() if path.name != ".index.sqlite"]
    done = subprocess.run([sys.executable, "-c", code, *names, "-o", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert out.read_text().startswith("<!doctype html>")


@pytest.fixture(scope="module")
def real(module_cli: Cli) -> dict[str, Any]:
    return module_cli.run(*SHORT, "ranks=2")


def test_a_real_run_in_every_form(module_cli: Cli, real: dict[str, Any]) -> None:
    for words in (
        ("-o", "r.html"),
        ("-o", "r.md"),
        ("-o", "r.json"),
        ("--format", "csv", "-o", "csv"),
        ("--format", "svg", "-o", "svg"),
    ):
        result = module_cli("report", "last", *words)
        assert result.returncode == 0, result.stderr
    folder = module_cli.folder
    found = json.loads((folder / "r.json").read_text())
    loss = next(each for each in found["parts"][0]["charts"] if each["id"] == "loss")
    tested = next(each for each in loss["series"] if each["name"] == "test")
    assert tested["y"] == pytest.approx([epoch["test_loss"] for epoch in real["epochs"]], rel=1e-5)
    with (folder / "csv" / "step.csv").open(newline="") as file:
        mean = next(csv.DictReader(file))
    shares = sum(float(value) for name, value in mean.items() if name != "bar")
    assert shares == pytest.approx(real["phases"]["mean_ns"]["total"] / 1e9, rel=1e-3)
    assert real["id"] in (folder / "r.md").read_text().replace("\\", "")
    assert (folder / "svg" / "timeline.svg").is_file()


def test_show_draws_on_demand_and_not_into_a_pipe(module_cli: Cli, real: dict[str, Any]) -> None:
    plain, drawn = module_cli("show", "last").stdout, module_cli("show", "last", "--plot").stdout
    assert "Accuracy  ──" not in plain
    assert "Accuracy  ── test  ·· train" in drawn
    assert re.search(r"rank 1 [█▓▒░]+ [\d.]+ .s", drawn)
    assert all(row in drawn for row in plain.splitlines()), "below what was there before"
