"""The studies that come with Lockstep, one TOML file each: every published experiment, one that measures the machine, and the search for rates behind one of them."""

from __future__ import annotations

from pathlib import Path

from lockstep.errors import InputError
from lockstep.reading import exists
from lockstep.study.definition import Study, nearest
from lockstep.study.file import read

HERE = Path(__file__).parent
# What `published` runs, in the order of the documents' questions.
ALL = "published"
OTHER = ("machine", "optimizer-rates")


def names() -> list[str]:
    """Every built-in study by name."""
    return sorted(path.stem for path in HERE.glob("*.toml"))


def published() -> list[str]:
    """The published experiments among them."""
    return [name for name in names() if name not in OTHER]


def text(name: str) -> str:
    """The file of a built-in study."""
    if name not in names():
        hint = nearest(name, names(), f"there are {', '.join(names())}")
        raise InputError(f"no built-in study '{name}': {hint}")
    return (HERE / f"{name}.toml").read_text(encoding="utf-8")


def find(name: str) -> list[Study]:
    """A study file, a built-in study, or all published ones."""
    if name == ALL:
        return [read(HERE / f"{each}.toml") for each in published()]
    if name in names():
        return [read(HERE / f"{name}.toml")]
    path = Path(name)
    if path.suffix == ".toml" or exists(path):
        return [read(path)]
    known = [*names(), ALL]
    hint = nearest(name, known, f"there are {', '.join(known)}; your own is a FILE.toml")
    raise InputError(f"no study '{name}': {hint}")
