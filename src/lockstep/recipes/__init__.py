"""The published recipes: the settings of the reports, as files that `lockstep run published/NAME` takes.

May import errors.py. Its door is `published` and `path_of`. A file begins with a comment: which document, what it states, what it leaves
open (and so is our choice), what it measured. The first line, `# Document D: …`, is what `lockstep recipes` lists.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import InputError

FOLDER = Path(__file__).parent
PREFIX = "published/"
REPORTS = (
    "Documents A to D are four published reports of a university course on distributed training (A0: the brief for A); "
    "docs/published-recipes.md says what each did"
)
"""For whoever meets one of these letters."""
_HEADER = re.compile(r"# Document (?P<document>\w+): (?P<about>.+)")


@dataclass(frozen=True)
class Published:
    """One recipe file."""

    name: str
    """As `lockstep run` takes it: published/d-mnist."""
    path: Path
    document: str
    about: str

    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")


def published() -> list[Published]:
    """All of them, by name."""
    return [_read(path) for path in sorted(FOLDER.glob(f"{PREFIX}*.toml"), key=lambda path: path.stem)]


def find(word: str) -> Published:
    """A recipe by its name, with or without `published/`; InputError with the nearest name."""
    known = {recipe.name: recipe for recipe in published()}
    name = word if word.startswith(PREFIX) else PREFIX + word
    if name in known:
        return known[name]
    raise InputError(f"no recipe '{word}'{_hint(name, known) or '; see lockstep recipes'}")


def path_of(word: str) -> Path | None:
    """The file of a word that names a published recipe; None if it is something else (key=value, a file of the user's own).

    A word that only comes near is an error with the nearest name, never something else by chance.
    """
    if "=" in word or word.endswith((".toml", ".py")):
        return None
    if word.startswith(PREFIX):
        return find(word).path
    hint = _hint(PREFIX + word, {recipe.name: recipe for recipe in published()})
    if hint:
        raise InputError(f"'{word}' is neither key=value nor a recipe{hint}")
    return None


def _hint(name: str, known: dict[str, Published]) -> str:
    """By the part after `published/`, which they all share."""
    if name in known:
        return f"; did you mean '{name}'?"
    ends = [other.removeprefix(PREFIX) for other in known]
    near = difflib.get_close_matches(name.removeprefix(PREFIX), ends, n=1, cutoff=0.7)
    return f"; did you mean '{PREFIX}{near[0]}'?" if near else ""


def _read(path: Path) -> Published:
    with path.open(encoding="utf-8") as file:
        header = _HEADER.match(file.readline())
    assert header, f"{path.name} does not begin with '# Document X: …'"
    return Published(f"{PREFIX}{path.stem}", path, header["document"], header["about"].strip())
