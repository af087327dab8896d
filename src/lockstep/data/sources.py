"""Folders as a source of the parts of a data set: the user's, a system package's, or our own."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from lockstep.data.catalog import Entry, Part
from lockstep.data.decode import Rejected, file_names, read_archive, read_part


@dataclass
class Collected:
    """The parts that were found so far, and what became of every source tried."""

    entry: Entry
    contents: dict[str, bytes] = field(default_factory=dict)
    origins: list[str] = field(default_factory=list)
    tried: list[tuple[str, str]] = field(default_factory=list)  # source, why it did not give everything

    @property
    def missing(self) -> list[Part]:
        return [part for part in self.entry.parts if part.name not in self.contents]

    def take(self, part: Part, content: bytes, origin: str) -> None:
        self.contents[part.name] = content
        if origin not in self.origins:
            self.origins.append(origin)

    def fail(self, source: str, reason: str) -> None:
        self.tried.append((source, reason))


def candidates(entry: Entry, part: Part, root: Path) -> list[Path]:
    """The files below `root` that may hold `part`, in every layout that people have."""
    paths = [root / folder / name for folder in entry.folders for name in file_names(part, entry.kind)]
    return _existing(paths)


def archives(entry: Entry, root: Path) -> list[Path]:
    return _existing([root / folder / name for folder in entry.folders for name in entry.archives])


def stamp(entry: Entry, root: Path) -> list[tuple[str, int, int]]:
    """Path, size and time of change of every file that would be read from `root`."""
    paths = [path for part in entry.parts for path in candidates(entry, part, root)]
    facts = []
    for path in dict.fromkeys([*paths, *archives(entry, root)]):
        status = path.stat()
        facts.append((str(path), status.st_size, status.st_mtime_ns))
    return facts


def from_folder(collected: Collected, root: Path, label: str) -> list[tuple[Path, str]]:
    """Take every part still missing that `root` has in good order; returns the bad files with the reason."""
    entry = collected.entry
    bad: list[tuple[Path, str]] = []
    for part in collected.missing:
        for path in candidates(entry, part, root):
            try:
                collected.take(part, read_part(path, part, entry.kind), f"{label} {path.parent}")
                break
            except Rejected as error:
                bad.append((path, str(error)))
    for path in archives(entry, root) if collected.missing else []:
        bad += _from_archive(collected, path, label)
    if collected.missing:
        absent = ", ".join(part.name for part in collected.missing)
        lines = [f"{path.relative_to(root)}: {reason}" for path, reason in bad]
        collected.fail(f"{label} {root}", "; ".join(lines) or f"not there: {absent}")
    return bad


def _from_archive(collected: Collected, path: Path, label: str) -> list[tuple[Path, str]]:
    bad = []
    try:
        found = read_archive(path, collected.missing, collected.entry.kind)
    except (Rejected, OSError) as error:
        return [(path, str(error))]
    for part in collected.missing:
        content = found.get(part.name)
        if isinstance(content, bytes):
            collected.take(part, content, f"{label} {path}")
        else:
            bad.append((path, str(content) if content else f"{part.name} is not in it"))
    return bad


def _existing(paths: list[Path]) -> list[Path]:
    found = []
    for path in dict.fromkeys(paths):
        try:
            if path.is_file():
                found.append(path)
        except OSError:  # a folder that we may not enter has nothing for us
            continue
    return found
