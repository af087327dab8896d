"""A race on disk: RUNS/races/NAME/ with race.json (who races, and the result so far), windows.jsonl (all that was measured), environment.json."""

from __future__ import annotations

import platform
import secrets
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from lockstep.errors import InputError
from lockstep.machine.cores import cores
from lockstep.machine.cpu import cpu_model
from lockstep.measure.environment import version_of
from lockstep.placement import Placement
from lockstep.reading import exists, is_file, read_records
from lockstep.recipe import Recipe
from lockstep.run import append_line, check_name, folder_error, read_struct, runs_root, write_atomic
from lockstep.shapes import Number, Share
from lockstep.turns.estimate import Ratio, Window, cores_had
from lockstep.turns.race import Budget, Race

FORMAT = 1
ROOM = "races"


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One contender, as it was named and as it was resolved."""

    name: str
    recipe: Recipe
    placement: Placement
    script: str | None = None
    """A training loop of the user's own, instead of the recipe's."""
    script_args: list[str] = []
    command: list[str] = []
    """A foreign program instead."""
    images: Number = 0.0
    """What it trains from one line that it prints to the next; 0: not known."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of race.json."""

    format: int = FORMAT
    created: float
    lockstep: str
    cpu: str
    machine: dict[str, str] = {}
    """What else it was measured on."""
    common: str = ""
    """The words that hold for all."""
    entries: list[Entry]
    budget: Budget
    over: bool = False
    """It was settled, or its budget was spent; false where it is under way or was stopped."""
    seconds: float = 0.0
    starts: int = 0
    disturbed: int = 0
    ratios: list[Ratio] = []
    cpu_ratios: list[Ratio] = []
    """By processor time: what is left of a difference where others took the processor."""
    failures: dict[str, str] = {}
    cores_had: Share | None = None
    """The share of their cores that the contenders had (machine/starving.py); None where it is not known: of foreign programs, and of old races."""


class RaceFolder:
    """One race's folder, for writing by whoever runs it and for reading by everyone else."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, runs: Path | None, name: str | None) -> RaceFolder:
        if name is not None:
            check_name("--name ", name, "race")
        path = runs_root(runs) / ROOM / (name or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            raise InputError(f"race folder {path} exists already: choose another --name") from None
        except OSError as error:
            raise folder_error(path, error) from None
        return cls(path.absolute())

    @classmethod
    def find(cls, name: str, runs: Path | None) -> RaceFolder | None:
        """By its name, by a path, or 'last'; None if there is no such race."""
        if is_file(Path(name) / "race.json"):
            return cls(Path(name))
        there = _folders(runs_root(runs) / ROOM)
        if name == "last" and there:
            return cls(max(there, key=lambda path: path.stat().st_mtime))
        return next((cls(path) for path in there if path.name == name), None)

    @property
    def starts(self) -> Path:
        """Where the ranks of each start have their folders, while they are there."""
        return self.path / "starts"

    def write(self, record: Record) -> None:
        try:
            write_atomic(self.path / "race.json", msgspec.to_builtins(record))
        except OSError as error:
            raise folder_error(self.path, error) from None

    def forget_unless_measured(self) -> None:
        """Wrong input is no race: a folder without a window is removed again."""
        if not exists(self.path / "windows.jsonl"):
            shutil.rmtree(self.path, ignore_errors=True)

    def read(self) -> Record:
        return read_struct(self.path / "race.json", Record, "race")

    def keep(self, windows: Sequence[Window]) -> None:
        for window in windows:
            append_line(self.path / "windows.jsonl", msgspec.to_builtins(window))

    def windows(self) -> list[Window]:
        return [msgspec.convert(line, Window) for line in read_records(self.path / "windows.jsonl", Window)]


def _folders(room: Path) -> list[Path]:
    try:
        return [path for path in room.iterdir() if is_file(path / "race.json")]
    except OSError:  # there is none, or its name is not one that a folder can have
        return []


def opening(entries: Sequence[Entry], common: str, budget: Budget) -> Record:
    """The record of a race that is about to begin."""
    return Record(
        created=time.time(),
        lockstep=version_of("lockstep") or "unknown",
        cpu=cpu_model(),
        machine={"cores": str(cores()), "torch": version_of("torch") or "unknown", "system": platform.platform()},
        common=common,
        entries=list(entries),
        budget=budget,
    )


def state_of(race: Race, record: Record, over: bool) -> Record:
    """The record with what the race has found so far."""
    return msgspec.structs.replace(
        record,
        over=over,
        seconds=race.elapsed,
        starts=race.starts,
        disturbed=race.disturbed,
        ratios=race.ratios(),
        cpu_ratios=race.ratios("cpu"),
        failures=dict(race.failures),
        cores_had=cores_had(race.windows),
    )
