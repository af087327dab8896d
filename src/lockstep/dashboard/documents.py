"""Reports for the pages: made by a separate process, one at a time, and cached while their runs do not change."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from lockstep.dashboard.listing import Listing
from lockstep.dashboard.maker import Asked
from lockstep.dashboard.security import Refused, check_folder
from lockstep.process import PARENT
from lockstep.run import OVER
from lockstep.ways import BESIDE

MOST_RUNS = 50
KEPT = 16
PATIENCE_S = 180.0


@dataclass(frozen=True)
class Made:
    """A report as JSON."""

    body: bytes
    live: bool = False
    """For a running run: without the plots that the page draws live."""


class Documents:
    def __init__(self, listing: Listing) -> None:
        self._listing = listing
        self._one_at_a_time = threading.Lock()
        self._kept: OrderedDict[Hashable, bytes] = OrderedDict()

    def of_runs(self, names: Sequence[str]) -> Made:
        """The report of one run, or of several beside each other."""
        if not 1 <= len(names) <= MOST_RUNS:
            raise Refused(400, f"choose 1 to {MOST_RUNS} runs")
        runs = [self._listing.run(name) for name in names]
        for run in runs:
            check_folder(self._listing.root, run.folder)
        ended = all(run.status()["state"] in OVER for run in runs)
        folders = [run.folder for run in runs]
        asked = Asked(runs=[str(folder) for folder in folders], live=len(runs) == 1 and not ended)
        return Made(self._made(asked, _stamp(folders) if ended else None), asked.live)

    def of_study(self, name: str) -> Made:
        folder = self._listing.study(name)
        check_folder(self._listing.root, folder.path)
        runs = list(folder.runs_of(folder.read().items).values())
        for run in runs:
            self._listing.run(run.id)  # a link to a folder elsewhere is in no list of runs
            check_folder(self._listing.root, run.folder)
        ended = all(run.status()["state"] in OVER for run in runs)
        files = [path for path in folder.path.iterdir() if path.is_file()]
        stamp = _stamp([*files, *(run.folder for run in runs)]) if ended else None
        return Made(self._made(Asked(study=str(folder.path)), stamp))

    def _made(self, asked: Asked, stamp: Hashable | None) -> bytes:
        """Make a report, or return the one made from the same files; a stamp of None means that it is never cached."""
        key = (msgspec.json.encode(asked), stamp)
        with self._one_at_a_time:
            if stamp is not None and key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            made = _make(asked)
            if stamp is not None:
                self._kept[key] = made
                while len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
            return made


def _stamp(paths: Sequence[Path]) -> Hashable:
    """Every relevant file of a run, and the measurements beside it, is replaced by a rename, which changes its folder's time stamp."""
    found = [beside for path in paths for beside in (path, path / BESIDE) if beside.exists()]
    return tuple((str(path), path.stat().st_mtime_ns) for path in found)


def _make(asked: Asked) -> bytes:
    # -P: nothing is imported from the current folder.
    command = [sys.executable, "-P", "-m", "lockstep.dashboard.maker"]
    environment = {**os.environ, PARENT: str(os.getpid())}
    try:
        done = subprocess.run(
            command, input=msgspec.json.encode(asked), env=environment, capture_output=True, timeout=PATIENCE_S
        )
    except subprocess.TimeoutExpired:
        raise Refused(
            504, f"the report was not ready after {PATIENCE_S:.0f} s: 'lockstep report' makes it as a file"
        ) from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise Refused(500, said[-1] if said else "the report could not be made")
    return done.stdout
