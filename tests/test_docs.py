"""The documentation: every link leads somewhere, and every command and key that it names exists."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import lockstep
from lockstep.cli.commands import COMMANDS
from lockstep.settings import all_keys
from support import Cli

ROOT = Path(__file__).parents[1]
DECISIONS = sorted(ROOT.glob("docs/decisions/*.md"))
PAGES = [*sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]), *DECISIONS]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
    for target in re.findall(r"\bdocs/[\w/-]+\.(?:md|svg)\b", text):
        assert (ROOT / target).exists(), f"{page.name} names {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page: Path) -> None:
    for name in re.findall(r"(?:^|`|\$ )\s*lockstep ([a-z]+)\b", page.read_text(), flags=re.MULTILINE):
        assert name in COMMANDS, f"{page.name} names 'lockstep {name}'"


def test_every_key_is_documented() -> None:
    text = (ROOT / "docs/recipes.md").read_text() + (ROOT / "docs/placements.md").read_text()
    tables = ("optimizer.", "slurm.")
    for key in all_keys():
        name = key if not key.startswith(tables) else key.partition(".")[2]
        assert re.search(rf"\b{name}\b", text), f"{key} is in neither docs/recipes.md nor docs/placements.md"


def test_source_comments_name_pages_that_exist() -> None:
    for path in (ROOT / "src").rglob("*.py"):
        for target in re.findall(r"docs/[\w/-]+\.md", path.read_text()):
            assert (ROOT / target).exists(), f"{path.name} names {target}"


# The change log is a list of long items.
UNWRAPPED = {"CHANGELOG.md"}


@pytest.mark.parametrize("page", [p for p in PAGES if p.name not in UNWRAPPED], ids=lambda page: page.name)
def test_prose_is_wrapped(page: Path) -> None:
    """Long lines make a diff of one word a diff of a paragraph. Tables and code keep their lines."""
    in_code = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.startswith("```"):
            in_code = not in_code
        if in_code or line.startswith(("|", "    ", "!")):
            continue
        assert len(line) <= 110, f"{page.name}:{number} has {len(line)} characters"


def figures() -> ModuleType:
    return script("benchmark_figures")


def script(name: str) -> ModuleType:
    """One of docs/, which is no part of a package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_benchmark_figures_is_that_of_the_results() -> None:
    assert (ROOT / "docs/benchmark-figures.md").read_text() == figures().page(), "run docs/benchmark_figures.py"
    for path, tables in figures().quoted().items():
        text = path.read_text()
        assert text == figures().with_tables(text, tables), "run docs/benchmark_figures.py"
        for mark, lines in tables.items():
            assert len(lines) > 5
            assert "\n".join(lines) in text.partition(mark)[2]


def test_pages_that_name_a_document_by_its_letter_say_whose_it_is() -> None:
    named = script("study_pages").LETTERED
    pages = [
        page for page in (*ROOT.glob("docs/*.md"), *ROOT.glob("docs/studies/*.md")) if named.search(page.read_text())
    ]
    there = {page.name for page in pages if "published-recipes.md" in page.read_text()}
    assert {page.name for page in pages} - there <= {"published-recipes.md"}
    assert {"d-open-settings.md", "workers.md", "benchmarks.md", "benchmark-figures.md"} <= there


def test_the_page_of_benchmark_figures_says_of_every_goal_whether_it_was_met() -> None:
    """Also where that is no comparison of two contenders, but stands in the notes."""
    page, found = " ".join(figures().page().split()), 0
    for path in figures().newest():
        goals = [note for note in json.loads(path.read_text())["notes"] if "(goal" in note]
        assert [note for note in goals if f"- {note}" not in page] == [], path.name
        found += len(goals)
    assert found > 3
    assert "0 comparisons have a target" not in page


def test_figures_of_two_kinds_of_processor_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As results of today and those of before the kind was recorded may have the same name, cores and instructions."""
    module = figures()
    kinds = ("AMD EPYC", "AMD EPYC (family 25, model 17)", "AMD EPYC (family 26, model 2)")
    pair = {"ours": "lockstep", "theirs": "lightning", "how": "speed", "clock": "wall", "target": None, "values": [1.0]}
    for day, cpu in enumerate(kinds, 1):
        on = {"cpu": cpu, "cores": 2, "instructions": "avx512"}
        one = pair | {"median": float(day), "interval": [day - 0.25, day + 0.25]}
        document = {"valid": True, "machine": on, "comparisons": [one]}
        (tmp_path / f"2026-11-0{day}-peers.json").write_text(json.dumps(document))
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    heads = [line.split(" | ")[0] for line in module.glance() if "times as fast" in line]
    assert heads == [
        "| 2 cores of an AMD EPYC (AVX512)",
        "| 2 cores of an AMD EPYC (family 25, model 17, AVX512)",
        "| 2 cores of an AMD EPYC (family 26, model 2, AVX512)",
    ]
    assert module.intervals() == {"0.75 to 1.25", "1.75 to 2.25", "2.75 to 3.25"}


def made_by(cpu: str) -> SimpleNamespace:
    """A training of a study, as far as its page asks what it ran on."""
    seen = {"cores_machine": 2, "cpu": cpu, "torch": "2.13", "lockstep": "0.1"}
    return SimpleNamespace(run=SimpleNamespace(environment=lambda: seen))


def test_a_page_of_a_study_names_every_machine_that_it_was_made_on() -> None:
    machine = {"cores": "2", "cpu": "AMD EPYC", "torch": "2.13", "lockstep": "0.1"}
    time = SimpleNamespace(race=SimpleNamespace(state=SimpleNamespace(machine=machine)))
    machines, here = script("study_pages").machines, "2 cores of an AMD EPYC, torch 2.13, Lockstep 0.1"

    def cell(*trained: str, time: object = time) -> SimpleNamespace:
        return SimpleNamespace(time=time, done=[made_by(cpu) for cpu in trained])

    assert machines([cell("AMD EPYC"), cell("AMD EPYC")]) == machines([cell()]) == here
    assert machines([cell("AMD EPYC", time=None)]) == here
    other = "AMD EPYC (family 26, model 2)"
    assert machines([cell("AMD EPYC"), cell(other)]) == (
        f"raced on {here}; trained on {here}; and on {here.replace('AMD EPYC', other)}"
    )
    assert machines([cell(other)]) == f"raced on {here}; trained on {here.replace('AMD EPYC', other)}"


def test_a_note_about_a_pack_goes_with_what_it_is_about() -> None:
    note = script("study_pages").note

    def of(study: str, seconds: float, *runs: str) -> str:
        return " ".join(note(study, {"cells": [{"runs": runs}], "race": {"seconds": seconds}}))

    old, new = "20261117-085101-cifar-1fead0c32d4c", "20261130-085101-cifar-1fead0c32d4c"
    assert of("cifar", 100.0, old, new).startswith("The trainings of 2026-11-17")
    assert of("cifar", 100.0, new) == of("scaling", 100.0, old) == ""
    assert "the order of the table" in of("optimizers", 861.4, new)
    assert of("optimizers", 900.0, new) == ""


QUOTING = ("README", "docs/augmentation", "docs/kernels", "docs/mpi", "docs/precision", "docs/quantization", "docs/shm")


@pytest.mark.parametrize("name", [*QUOTING, "docs/strategies", "docs/training"])
def test_quoted_intervals_are_those_of_the_newest_results(name: str) -> None:
    """Intervals with decimals, but for those of accuracies ("96.3 % (95.6 to 96.4)"), which the results do not compare."""
    quoted = re.findall(r"(?<!% )\((\d[\d.]* to \d+\.\d+)[),]", (ROOT / f"{name}.md").read_text())
    assert quoted
    assert set(quoted) <= figures().intervals()


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_a_decision_is_short_and_whole(page: Path) -> None:
    lines = page.read_text().splitlines()
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 100
    assert re.fullmatch(rf"# {int(page.name[:4])}\. .+", lines[0])
    assert [line for line in lines if line.startswith("#")][1:] == [
        "## Context",
        "## Decision",
        "## Why",
        "## Consequences",
    ]


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_files_that_a_decision_names_exist(page: Path) -> None:
    for name in re.findall(r"`((?:[\w]+/)*[\w]+(?:\.py|/))`", page.read_text()):
        places = [ROOT / name, ROOT / "src/lockstep" / name]
        assert any(place.exists() for place in places), f"{page.name} names {name}"


def test_decisions_are_numbered_and_listed() -> None:
    assert [int(page.name[:4]) for page in DECISIONS] == list(range(1, len(DECISIONS) + 1))
    listed = re.findall(r"\]\(decisions/([\w-]+\.md)\)", (ROOT / "docs/design.md").read_text())
    assert listed == [page.name for page in DECISIONS]


def test_the_map_is_up_to_date() -> None:
    done = subprocess.run([sys.executable, ROOT / "docs/code_map.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_command_of_the_tutorial_works(cli: Cli) -> None:
    """In their order, in one folder. What a race or a study finds on this machine is not judged."""
    commands = re.findall(r"^    \$ lockstep (.+)$", (ROOT / "docs/tutorial.md").read_text(), re.MULTILINE)
    assert len(commands) >= 8
    for command in commands:
        done = cli(*shlex.split(command), timeout=600)
        assert done.returncode == 0, f"{command}: {done.stderr}"


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """A link that leads nowhere, an anchor that is not there, or a page in no table of contents is one."""
    pytest.importorskip("sphinx", reason="needs Sphinx: make docs")
    words = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    done = subprocess.run(
        [*words, "-d", tmp_path / "trees", ROOT / "docs", tmp_path / "site"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert pages <= {path.stem for path in (tmp_path / "site").glob("*.html")}
    assert "--budget" in (tmp_path / "site" / "cli.html").read_text(), "the commands' own options"
    assert all(f'id="lockstep.{name}"' in (tmp_path / "site" / "api.html").read_text() for name in lockstep.__all__)
