"""The documentation: every link leads somewhere, and every command and key that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lockstep.cli import COMMANDS
from lockstep.settings import all_keys

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
    for target in re.findall(r"\bdocs/[\w-]+\.(?:md|svg)\b", text):
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
        for target in re.findall(r"docs/[\w-]+\.md", path.read_text()):
            assert (ROOT / target).exists(), f"{path.name} names {target}"
