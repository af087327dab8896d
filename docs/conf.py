"""How `make docs` builds the site: Sphinx reads the pages as they stand here, the ones that GitHub shows too."""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

HERE = Path(__file__).parent
project = "Lockstep"
author = "the authors of Lockstep"
release = re.search(r'^version = "(.+)"', (HERE.parent / "pyproject.toml").read_text(), re.MULTILINE)[1]  # type: ignore[index]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_click", "sphinx.ext.githubpages"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
html_theme = "furo"
html_title = f"Lockstep {release}"
html_show_copyright = html_show_sphinx = False
pygments_style, pygments_dark_style = "friendly", "monokai"
myst_heading_anchors = 4
# Commands and their output stand in indented blocks: they are neither Python nor anything else that could be coloured.
highlight_language = "none"
smartquotes = False  # "--dry-run" stays as it is typed
# The same page, read on GitHub and as a site: what lies outside of docs/ is a link there, and plain text here.
_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?:src|tests|benchmarks|examples|CONTRIBUTING|CHANGELOG|README)[^)]*\)")


def _stay_inside(app: Sphinx, name: str, source: list[str]) -> None:
    source[0] = _OUTSIDE.sub(r"`\1`", source[0])


def setup(app: Sphinx) -> None:
    app.connect("source-read", _stay_inside)
