"""A reader who would rather look finds a picture on every page, of what the page speaks of."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from house import ROOT

# What is written by programs as tables, and the design, which has its diagram as text.
WITHOUT = ("benchmark-figures.md", "design.md", "map.md")
PAGES = sorted(ROOT.glob("docs/*.md"))
PICTURES = sorted(ROOT.glob("docs/pictures/*"))


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in WITHOUT], ids=lambda page: page.name)
def test_a_page_has_a_picture(page: Path) -> None:
    text = page.read_text()
    shown = re.findall(r"!\[[^\]]{10,}\]\(([^)]+)\)", text)
    assert shown, "no picture, or one without words for those who do not see it"
    for name in shown:
        assert (ROOT / "docs" / name).is_file(), name


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_a_picture_is_shown_and_says_nothing_of_the_machine(picture: Path) -> None:
    assert any(picture.name in page.read_text() for page in (*PAGES, ROOT / "README.md")), "no page shows it"
    if picture.suffix == ".svg":
        assert not re.search(r"(?<![\w.~])/(work|root|home|tmp)\b", picture.read_text())
