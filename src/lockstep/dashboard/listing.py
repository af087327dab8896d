"""The list of runs and studies: kept in memory, refreshed at most every other second, filtered, sorted and paged here."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from lockstep import index
from lockstep.dashboard.security import Refused, leads_inside
from lockstep.errors import InputError
from lockstep.index import Row
from lockstep.metrics import RECORDED
from lockstep.run import Run, runs_root
from lockstep.study.folder import StudyFolder, list_studies
from lockstep.study.plan import Planned, plain

PAGE = 50
LEAST_S = 1.0
# Refreshing may take this share of one core: the runs need the rest.
SHARE = 0.03
# The columns that hold figures, and how the page names and writes them.
FIGURES = {
    name: {"label": figure.label, "unit": figure.unit, "better": figure.better}
    for name in ("test_accuracy", "test_loss", "train_seconds", "images_per_second")
    if (figure := RECORDED[name])
}
Sort = Literal[
    "created",
    "id",
    "state",
    "model",
    "ranks",
    "global_batch",
    "epochs",
    "test_accuracy",
    "test_loss",
    "train_seconds",
    "images_per_second",
]
UNDER_WAY = ("starting", "running")
SEARCHED = ("id", "state", "model", "data", "launcher", "precision")


class Query(msgspec.Struct, frozen=True):
    """Which part of the list is requested."""

    words: str = ""
    state: str = ""
    sort: Sort = "created"
    down: bool = True
    page: Annotated[int, msgspec.Meta(ge=1, lt=10**9)] = 1

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Query:
        try:
            return msgspec.convert(given, cls, strict=False)
        except msgspec.ValidationError as error:
            raise Refused(400, str(error)) from None

    def fits(self, row: Row) -> bool:
        if self.state and self.state != group_of(row["state"]):
            return False
        text = " ".join(str(row.get(key) or "") for key in SEARCHED).lower() if self.words else ""
        return all(word in text for word in self.words.lower().split())


def group_of(state: str) -> str:
    """States grouped as people search for them."""
    return "under way" if state in UNDER_WAY else "failed" if state in ("failed", "stalled") else state


class Listing:
    """Everything below one folder of runs."""

    def __init__(self, root: Path) -> None:
        self.root = runs_root(root)
        self._lock = threading.Lock()
        self._rows: list[Row] = []
        self._places: dict[str, int] = {}
        self._again_at = 0.0
        self._plans: dict[str, tuple[float, Planned]] = {}

    def rows(self) -> list[Row]:
        return self._look()[0]

    def _look(self, now: bool = False) -> tuple[list[Row], dict[str, int]]:
        """All rows, and the index of each by its name; from memory, unless it is time to refresh."""
        with self._lock:
            if now or time.monotonic() >= self._again_at:
                began = time.thread_time()
                # The old rows are freed first: ten thousand rows twice would take as much memory as everything else.
                self._rows = []
                self._rows = [self._row(row) for row in index.rows(self.root)]
                self._places = {row["id"]: place for place, row in enumerate(self._rows)}
                self._again_at = time.monotonic() + max(LEAST_S, (time.thread_time() - began) / SHARE)
            return self._rows, self._places

    def _row(self, row: Row) -> Row:
        if row["state"] in UNDER_WAY:
            run = Run(self.root / row["id"])
            beats = run.rank_statuses()
            first = next((beat for beat in beats if beat.get("rank") == 0), {})
            row["sign"] = max((float(beat.get("time") or 0.0) for beat in beats), default=0.0) or None
            row |= {key: first.get(key) for key in ("step", "epoch", "loss", "images_per_second")}
            row["steps"] = _total_steps(run)
        return row

    def run(self, name: str) -> Run:
        """A run by its whole name, which must be in the list: no path is made of what a browser sends."""
        for now in (False, True):  # it may have begun since the last refresh
            rows, places = self._look(now)
            if name in places:
                return Run(self.root / rows[places[name]]["id"])
        raise Refused(404, "there is no such run (any more)")

    def study(self, name: str) -> StudyFolder:
        found = next((study for study in self._folders() if study.name == name), None)
        if found is None:
            raise Refused(404, "there is no such study (any more)")
        return found

    def view(self, query: Query) -> dict[str, Any]:
        rows = self.rows()
        fitting = [row for row in rows if query.fits(row)]
        fitting = _sorted(fitting, query)
        pages = max(1, -(-len(fitting) // PAGE))
        page = min(query.page, pages)
        return {
            "rows": fitting[(page - 1) * PAGE : page * PAGE],
            "found": len(fitting),
            "all": len(rows),
            "page": page,
            "pages": pages,
            "counts": dict(Counter(group_of(row["state"]) for row in rows)),
            "studies": self.studies(),
        }

    def studies(self) -> list[dict[str, Any]]:
        folders = self._folders()
        if not folders:
            return []
        states = {row["id"]: row["state"] for row in self.rows()}
        found = [line for folder in folders if (line := self._study(folder, states))]
        return sorted(found, key=lambda line: float(line["changed"]), reverse=True)

    def _folders(self) -> list[StudyFolder]:
        """Studies that are really in this folder: links to other places are ignored."""
        return [study for study in list_studies(self.root) if leads_inside(study.path / "study.json", self.root)]

    def _study(self, folder: StudyFolder, states: Mapping[str, str]) -> dict[str, Any] | None:
        try:
            changed = folder.changed
            known = self._plans.get(folder.name)
            if known is None or known[0] != changed:
                known = self._plans[folder.name] = (changed, folder.read())
        except OSError:
            return None
        except InputError:
            nothing = dict.fromkeys(("changed", "cells", "planned", "done", "failed", "active"), 0)
            return {"name": folder.name, "about": "study.json cannot be read", "runs": "", **nothing}
        planned = known[1]
        started = folder.started()
        expected = planned.expected(started)
        groups = Counter(group_of(_state(started.get(item.digest, []), states)) for item in expected)
        return {
            "name": folder.name,
            "about": planned.study.about,
            "runs": plain(planned.study.name),
            "changed": changed,
            "cells": len(planned.cells),
            "planned": len(expected),
            **{key: groups[state] for key, state in (("done", "done"), ("failed", "failed"), ("active", "under way"))},
        }


def _state(names: Sequence[str], states: Mapping[str, str]) -> str:
    """The state of several attempts at one run, oldest first: done if one is, else the state of the newest."""
    known = [states[name] for name in names if name in states]
    return "done" if "done" in known else known[-1] if known else "to do"


def _total_steps(run: Run) -> int | None:
    try:
        return run.spec().plan.total_steps or None  # an attached command knows it alone
    except InputError:
        return None


def _sorted(rows: list[Row], query: Query) -> list[Row]:
    """Sort by a column; runs without a value come last in both directions."""
    known = [row for row in rows if row.get(query.sort) is not None]
    unknown = [row for row in rows if row.get(query.sort) is None]
    return sorted(known, key=lambda row: row[query.sort], reverse=query.down) + unknown
