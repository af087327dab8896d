"""Paths that say who packed a study and where: replaced by short words before a file leaves the machine.

    the folder of runs, now and when each run was made    runs
    the home folder of whoever packs                      ~
    the Python environment of each run                    env

Only texts that no reader follows change: launch commands, options, causes of failures, logs. Texts of study.json stay
as they are wherever they appear: recipes, placements and names of cells are compared and hashed. So a path in a recipe
(model=/home/ana/net.py:Net) stays, and so do other absolute paths (a data folder on another disk).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lockstep.files import home_path
from lockstep.reading import Damaged
from lockstep.run import Run, read_json
from lockstep.study.folder import StudyFolder

# Every machine has these: they say nothing, and would be replaced in many harmless places.
COMMON = {"", "/", "/usr", "/usr/local"}
_PYTHON = re.compile(r"(/.+)/bin/python[\d.]*")


class PrivatePaths:
    """Replaces paths in the contents of files."""

    def __init__(self, words: dict[str, str], kept: Iterable[str] = ()) -> None:
        self._kept = set(kept)
        self._words = {path: word for path, word in words.items() if path not in COMMON and path.startswith("/")}
        # The longest path first: the folder of runs may lie in the home folder. /home/al must not match /home/alice.
        longest = sorted(self._words, key=lambda path: (-len(path), path))
        self._pattern = re.compile(f"(?:{'|'.join(map(re.escape, longest))})(?![\\w-])")
        self._written = [form.encode(errors="surrogateescape") for path in longest for form in {path, _in_json(path)}]

    @classmethod
    def of(cls, study: StudyFolder, root: Path, runs: Iterable[Run]) -> PrivatePaths:
        """The paths of this user and those in the launch commands of runs, but for the texts of study.json."""
        content = read_json(study.path / "study.json") or {}
        if isinstance(content.get("study"), dict):
            content["study"].pop("files", None)  # where recipe files were; they have been read
        return cls(paths_of(root, runs), _texts(content))

    def removed(self, name: str, data: bytes) -> bytes:
        """A file's contents without these paths; the same bytes where there is none."""
        if not self._words or not any(path in data for path in self._written):
            return data
        if name.endswith(".json"):
            return self._json(data, indent=1)
        if name.endswith(".jsonl"):
            return b"\n".join(self._json(line) if line.strip() else line for line in data.split(b"\n"))
        return self._text(data) if name.endswith((".log", ".txt")) else data

    def _json(self, data: bytes, indent: int | None = None) -> bytes:
        try:
            value = json.loads(data)
            changed = self._value(value)
            return data if changed == value else json.dumps(changed, indent=indent).encode()
        except (ValueError, RecursionError):  # damaged, and stays so
            return self._text(data)

    def _value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._short(value)
        if isinstance(value, list):
            return [self._value(one) for one in value]
        if isinstance(value, dict):
            return {self._short(key): self._value(one) for key, one in value.items()}
        return value

    def _text(self, data: bytes) -> bytes:
        return self._short(data.decode(errors="surrogateescape")).encode(errors="surrogateescape")

    def _short(self, text: str) -> str:
        return text if text in self._kept else self._pattern.sub(lambda found: self._words[found[0]], text)


def paths_of(root: Path, runs: Iterable[Run]) -> dict[str, str]:
    """The paths of this user, of a folder of runs and of their launch commands, each with the word that takes its place."""
    words: dict[str, str] = {}
    for run in runs:
        try:
            command = run.spec().command
        except Damaged:
            continue
        for argument in {argument for process in command for argument in process}:
            if argument.endswith(f"/{run.id}"):
                words[argument.removesuffix(f"/{run.id}")] = "runs"
            elif python := _PYTHON.fullmatch(argument):
                words[python[1]] = "env"
    for place, word in ((home_path("~"), "~"), (root.absolute(), "runs")):
        words |= {str(place): word, os.path.realpath(place): word}
    return words


def _in_json(path: str) -> str:
    return json.dumps(path)[1:-1]


def _texts(content: Any) -> Iterator[str]:
    """Every text of a JSON document, keys too."""
    left = [content]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            left += [*value, *value.values()]
