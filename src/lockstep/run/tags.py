"""Tags: names that people give to runs. Each run keeps its own, so that they go wherever its folder goes."""

from __future__ import annotations

from pathlib import Path

from lockstep.errors import InputError
from lockstep.reading import Damaged, read_shape
from lockstep.run.json_files import write_atomic
from lockstep.run.names import check_name

TAGS = "tags.json"
# A word with one of these is a condition (`ranks=2`), and one with a comma is a list of them.
RESERVED = "=<>!,"


def check_tag(name: str) -> None:
    """A tag stands where a run's name does."""
    check_name("--tag ", name, "tag")
    if found := next((sign for sign in RESERVED if sign in name), None):
        raise InputError(f"--tag {name}: a tag has no '{found}', which conditions on runs have: choose another")


def tags_of(folder: Path) -> list[str]:
    """The tags of a run; a file that cannot be read has none."""
    try:
        return read_tags(folder)
    except Damaged:
        return []


def read_tags(folder: Path) -> list[str]:
    """The same, for who must know them."""
    return read_shape(folder / TAGS, list[str]) or []


def write_tags(folder: Path, tags: list[str]) -> None:
    """Replace a run's tags. Its folder changes with them, which the index of runs notices."""
    write_atomic(folder / TAGS, sorted(set(tags)))
