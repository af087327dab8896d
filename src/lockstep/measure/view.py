"""One view of a run for everything that reads runs: study, explain, report, export and terminal agree because they ask the same object.

A view is a snapshot: each file is read once, on first use. `view` returns the same snapshot while no file of the run has changed. A
running run gets a new one each time: its step records are written in place, which does not change the file's time stamp.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from lockstep.index import SETTLED_NS
from lockstep.measure import attached, phases, records
from lockstep.measure.attached import Logged
from lockstep.measure.phases import Parts, Rows
from lockstep.run import ENDED, Run, Spec
from lockstep.ways import BESIDE, Way, read

T = TypeVar("T")
MOST_KEPT = 1000
Stamp = list[tuple[str, str, int, int, int]]


class RunView(Run):
    """A run whose files are read once."""

    _recent: RunView | None = None

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._known: dict[Any, Any] = {}
        self._rows: dict[int, Rows] = {}

    def _once(self, key: Any, find: Callable[[], T]) -> T:
        if key not in self._known:
            self._known[key] = find()
        found: T = self._known[key]
        return found

    def spec(self) -> Spec:
        return self._once("spec", super().spec)

    def status(self) -> dict[str, Any]:
        return self._once("status", super().status)

    def summary(self) -> dict[str, Any] | None:
        return self._once("summary", super().summary)

    def environment(self) -> dict[str, Any]:
        return self._once("environment", super().environment)

    def epochs(self, rank: int | None = None) -> list[dict[str, Any]]:
        own = super().epochs
        return self._once(("epochs", rank), lambda: own(rank))

    def damage(self) -> list[str]:
        return self._once("damage", super().damage)

    def rank_damage(self) -> list[str]:
        """Which of the ranks' own files cannot be read."""
        return self._once("rank damage", lambda: records.damage(self))

    @property
    def state(self) -> str:
        return str(self.status()["state"])

    @property
    def cause(self) -> str:
        return str(self.status().get("cause") or "")

    @property
    def ranks(self) -> int:
        return self.spec().plan.ranks

    @property
    def cores(self) -> int:
        placement = self.spec().placement
        return placement.ranks * (placement.threads or 1)

    @property
    def cores_had(self) -> float | None:
        """The share of its cores that the training had (machine/starving.py); None where it is not known."""
        found = (self.summary() or {}).get("cores_had")
        return None if found is None else float(found)

    def steps(self, rank: int) -> Rows:
        """Every step of a rank. Only one run's steps are kept in memory: a long run has hundreds of megabytes of them."""
        recent, RunView._recent = RunView._recent, self
        if recent is not None and recent is not self:
            recent._rows.clear()
        if rank not in self._rows:
            self._rows[rank] = records.read_steps(self.rank_folder(rank) / "steps.bin")
        return self._rows[rank]

    def all_steps(self) -> list[Rows]:
        return [self.steps(rank) for rank in range(self.ranks)]

    def after_warmup(self) -> list[Rows]:
        """Every rank's steps after warm-up, cut to the steps that all ranks have."""
        return phases.common([phases.after_warmup(rows) for rows in self.all_steps()])

    def split(self) -> list[Parts]:
        """The phases of a step of each rank, in seconds, with waiting separate from exchange; empty if no step was recorded by all ranks."""
        return self._once("split", lambda: phases.split(self.after_warmup()))

    def phases(self) -> dict[str, Any] | None:
        """The phases of a step in nanoseconds, as timed."""
        return self._once("phases", lambda: phases.step_phases(self.all_steps()))

    def attached(self) -> dict[str, Any]:
        """What the first rank of an attached command has told of itself (inside/recorder.py); empty for every other run."""
        beats = self._once("beats", self.rank_statuses)
        found = beats[0].get("attached") if beats else None
        return found if isinstance(found, dict) else {}

    def attached_ranks(self) -> list[dict[str, Any]]:
        """The same of every rank that has told."""
        found = (beat.get("attached") for beat in self._once("beats", self.rank_statuses))
        return [each for each in found if isinstance(each, dict)]

    def beside(self) -> dict[str, float]:
        """The named parts of "other" in a step of an attached command, in seconds, and how many values it reads; empty for every other run."""

        def find() -> dict[str, float]:
            rows = [attached.read_beside(self.rank_folder(rank)) for rank in range(self.ranks)]
            return attached.beside(self.all_steps(), rows) if all(map(len, rows)) else {}

        return self._once("beside", find)

    def gradients(self) -> dict[str, Any]:
        """Bytes and times of the gradients of an attached command's first rank; empty where they were not seen."""
        return self._once("gradients", lambda: attached.read_gradients(self.rank_folder(0)))

    def logged(self) -> list[Logged]:
        """What an attached script has logged, as its first rank that logs has it."""

        def find() -> list[Logged]:
            return next((found for folder in self.rank_folders() if (found := attached.read_logged(folder))), [])

        return self._once("logged", find)

    def ways(self) -> dict[str, Way]:
        """What `lockstep explain --measure` has measured for this run, by name; empty if nothing."""
        return self._once("ways", lambda: read(self.folder / BESIDE))


_kept: OrderedDict[Path, tuple[Stamp, RunView]] = OrderedDict()
_lock = threading.Lock()


def view(run: Run) -> RunView:
    """The run as it is now."""
    folder = run.folder.absolute()
    stamp = _stamp(folder)
    newest = max((changed for _, _, changed, _, _ in stamp), default=0)
    if run.recorded_status()["state"] not in ENDED or newest > time.time_ns() - SETTLED_NS:
        return RunView(run.folder)
    with _lock:
        known = _kept.pop(folder, None)
        found = known[1] if known and known[0] == stamp else RunView(run.folder)
        _kept[folder] = stamp, found
        while len(_kept) > MOST_KEPT:
            _kept.popitem(last=False)
    return found


def _stamp(folder: Path) -> Stamp:
    """The time of change and the size of every file that a view reads."""
    found: Stamp = []
    for place in (folder, *sorted((folder / "ranks").glob("[0-9]*")), folder / BESIDE):
        with suppress(OSError), os.scandir(place) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                status = entry.stat()
                found.append((place.name, entry.name, status.st_mtime_ns, status.st_size, status.st_ino))
    return found
