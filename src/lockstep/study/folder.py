"""A study on disk: RUNS/studies/NAME/ with study.json (what is run), log.jsonl (which runs, when, and what they cost), and a lock."""

from __future__ import annotations

import hashlib
import itertools
import re
import statistics
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from lockstep import shapes
from lockstep.errors import InputError
from lockstep.files import Held, locked
from lockstep.metrics import known_metrics
from lockstep.reading import Damaged, exists, is_file, read_records
from lockstep.run import Run, append_line, folder_error, read_struct, runs_root, write_atomic
from lockstep.study.plan import Item, Planned
from lockstep.text import is_text

ROOM = "studies"
# What `StudyFolder.of` puts behind a study's name.
_VARIANT = "(-quick)?(-[0-9a-f]{6})?"


class StudyFolder:
    """One study's folder, for writing by whoever runs it and for reading by everyone else."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of(cls, name: str, runs: Path | None, quick: bool = False, words: tuple[str, ...] = ()) -> StudyFolder:
        """A variant (--quick, key=value arguments) has its own folder, so that it does not hide the study itself."""
        suffix = "-quick" if quick else ""
        if words:
            suffix += "-" + hashlib.sha256(" ".join(sorted(words)).encode()).hexdigest()[:6]
        return cls(runs_root(runs) / ROOM / (name + suffix))

    @classmethod
    def find(cls, name: str, runs: Path | None) -> StudyFolder | None:
        """Find a study by its name, by a path, or 'last'; None if there is no such study.

        Where only variants of it were run (`study run NAME --quick`), the newest of them.
        """
        if is_file(Path(name) / "study.json"):
            return cls(Path(name))
        there = list_studies(runs)
        exact = [study for study in there if study.name == name]
        variant = re.compile(re.escape(name) + _VARIANT)
        found = exact or [study for study in there if name == "last" or variant.fullmatch(study.name)]
        return max(found, key=lambda study: study.changed, default=None)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def runs(self) -> Path:
        """Where its runs are."""
        return self.path.parent.parent

    @property
    def changed(self) -> float:
        try:
            return (self.path / "study.json").stat().st_mtime
        except OSError:  # a dangling link, or it was just removed
            return 0.0

    def write(self, planned: Planned) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path / "study.json", msgspec.to_builtins(planned))
        except OSError as error:
            raise folder_error(self.path, error) from None

    def read(self) -> Planned:
        planned = read_struct(self.path / "study.json", Planned, "study")
        claims = [claim.metric for published in planned.study.published for claim in published.claims]
        known = known_metrics(cell.recipe for cell in planned.cells)
        for metric in (*planned.study.metrics, *claims):
            if metric not in known:
                raise Damaged(
                    f"study {self.name} is damaged, or of another version of Lockstep: no such metric '{metric}'"
                )
        return planned

    def log(self, record: dict[str, Any]) -> None:
        append_line(self.path / "log.jsonl", record)

    def _lines(self) -> list[dict[str, Any]]:
        try:
            return read_records(self.path / "log.jsonl", shapes.StudyLine)
        except Damaged as error:
            raise Damaged(f"study {self.name} is damaged: {error}") from None

    def records(self) -> list[dict[str, Any]]:
        """How its runs ended, in the order of time."""
        return [line for line in self._lines() if "began" in line and "ended" in line]

    def proof_took(self, cell: str, seconds: float) -> None:
        """Of a cell that was to be proven, whatever came of it."""
        self.log({"proven": cell, "seconds": seconds})

    def proving_seconds(self) -> float:
        """Of all proofs together."""
        return sum(float(line.get("seconds", 0.0)) for line in self._lines() if "proven" in line)

    def begins(self, item: Item, run: str) -> None:
        """Noted before the run's folder is made, so that no kill leaves a run that its study does not know."""
        self.log({**msgspec.to_builtins(item), "run": run})

    def started(self) -> dict[str, list[str]]:
        """The names of the runs that this study has started, in the order of time, by digest."""
        found: dict[str, list[str]] = {}
        for line in self._lines():
            name, names = str(line.get("run") or ""), found.setdefault(str(line.get("digest")), [])
            # A run is a folder beside the studies: a name that leads elsewhere is ignored.
            if name and name == Path(name).name and name not in names:
                names.append(name)
        return found

    def runs_of(self, items: Iterable[Item]) -> dict[str, Run]:
        """The run of each item that has one, by digest: the newest that is done, else the newest."""
        started, found = self.started(), {}
        for item in items:
            there = [run for run in self._there(started, item) if not _unreadable(run)]
            done = [run for run in there if run.status()["state"] == "done"]
            if there:
                found[item.digest] = (done or there)[-1]
        return found

    def cut(self, item: Item) -> Run | None:
        """The newest run of an item that has a checkpoint to go on from."""
        runs = [run for run in self._there(self.started(), item) if not _unreadable(run)]
        return next((run for run in reversed(runs) if run.has_checkpoint), None)

    def damaged_of(self, items: Iterable[Item]) -> dict[str, list[str]]:
        """By cell: the runs without a readable spec, each with the reason. They are left out everywhere, and named."""
        started = self.started()
        found: dict[str, list[str]] = {}
        for item in items:
            for run in self._there(started, item):
                if said := _unreadable(run):
                    found.setdefault(item.cell, []).append(f"{run.id}: {said}")
        return found

    def _there(self, started: dict[str, list[str]], item: Item) -> list[Run]:
        runs = [Run(self.runs / name) for name in started.get(item.digest, ())]
        return [run for run in runs if exists(run.folder / "run.json")]

    @contextmanager
    def held(self) -> Iterator[None]:
        """One process at a time runs a study; the lock goes with the process, however it ends."""
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(self.path / "lock", "running this study", wait=False))
            except OSError as error:
                raise folder_error(self.path, error) from None
            except Held as error:
                raise InputError(
                    f"study '{self.name}' is being run by {error}: wait for it, or stop it with Ctrl-C"
                ) from None
            yield


def _unreadable(run: Run) -> str:
    try:
        run.spec()
    except Damaged as error:
        return str(error)
    return ""


def list_studies(runs: Path | None) -> list[StudyFolder]:
    """Every study that was begun here, by name."""
    room = runs_root(runs) / ROOM
    try:
        # A name that is not UTF-8 is not ours: it could not be written into any document.
        names = sorted(path.name for path in room.iterdir() if is_text(path.name) and exists(path / "study.json"))
    except OSError:
        return []
    return [StudyFolder(room / name) for name in names]


def overheads(records: list[dict[str, Any]]) -> dict[str, float] | None:
    """The median seconds spent around a run, by cause."""
    done = [record for record in records if {"prepare_s", "start_s", "finish_s"} <= record.keys()]
    if not done:
        return None
    parts = {part: statistics.median(record[part] for record in done) for part in ("prepare_s", "start_s", "finish_s")}
    gaps = [b["began"] - a["ended"] for a, b in itertools.pairwise(records) if 0 <= b["began"] - a["ended"] < 60]
    parts["between_s"] = statistics.median(gaps) if gaps else 0.0
    whole = [record["prepare_s"] + record["start_s"] + record["finish_s"] for record in done]
    return {"runs": float(len(done)), "overhead_s": statistics.median(whole) + parts["between_s"], **parts}
