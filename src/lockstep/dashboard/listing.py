"""The list of runs and studies: kept in memory, looked at anew at most every other second, filtered, sorted and cut into pages here."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep import index
from lockstep.dashboard.security import Refused, leads_inside
from lockstep.errors import InputError
from lockstep.index import Row
from lockstep.run import Run, runs_root
from lockstep.study.folder import StudyFolder, list_studies
from lockstep.study.plan import Planned

PAGE = 50
LEAST_S = 1.0
# Looking may take this share of one core: the runs need the others, and this one.
SHARE = 0.03
SORTS = (
    "created",
    "id",
    "state",
    "model",
    "ranks",
    "global_batch",
    "epochs",
    "test_accuracy",
    "train_seconds",
    "images_per_second",
)
UNDER_WAY = ("starting", "running")
SEARCHED = ("id", "state", "model", "data", "launcher", "precision")


@dataclass(frozen=True)
class Query:
    """What part of the list is asked for."""

    words: tuple[str, ...] = ()
    state: str = ""
    sort: str = "created"
    down: bool = True
    page: int = 1

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Query:
        sort, page = given.get("sort", "created"), given.get("page", "1")
        if sort not in SORTS:
            raise Refused(400, f"sort: one of {', '.join(SORTS)}")
        if not page.isascii() or not page.isdigit() or not 1 <= int(page[:9]) == int(page):
            raise Refused(400, "page: a number from 1 on")
        words = tuple(given.get("words", "")[:200].lower().split())
        return cls(words, given.get("state", ""), sort, given.get("down", "1") != "0", int(page))

    def fits(self, row: Row) -> bool:
        if self.state and self.state != group_of(row["state"]):
            return False
        if not self.words:
            return True
        text = " ".join(str(row.get(key) or "") for key in SEARCHED).lower()
        return all(word in text for word in self.words)


def group_of(state: str) -> str:
    """States as people look for them."""
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
        """All rows, and the place of each by its name; from memory, unless it is time to look again."""
        with self._lock:
            if now or time.monotonic() >= self._again_at:
                began = time.thread_time()
                # What is no longer needed goes first: ten thousand rows twice would be as much memory as all the rest.
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
        for now in (False, True):  # it may have begun since the last look
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
        """Those that are really here: a link to another place is none of ours."""
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
        groups = Counter(group_of(_state(started.get(item.digest, []), states)) for item in planned.items)
        return {
            "name": folder.name,
            "about": planned.study.about,
            "runs": _plain(planned.study.name),
            "changed": changed,
            "cells": len(planned.cells),
            "planned": len(planned.items),
            **{key: groups[state] for key, state in (("done", "done"), ("failed", "failed"), ("active", "under way"))},
        }


def _state(names: Sequence[str], states: Mapping[str, str]) -> str:
    """Of the attempts at one run, oldest first: done where one is, else how it is with the newest."""
    known = [states[name] for name in names if name in states]
    return "done" if "done" in known else known[-1] if known else "to do"


def _plain(name: str) -> str:
    """As it stands in the names of its runs."""
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def _total_steps(run: Run) -> int | None:
    try:
        return run.spec().plan.total_steps
    except InputError:
        return None


def _sorted(rows: list[Row], query: Query) -> list[Row]:
    """By a column; runs that have nothing there come last, whichever way."""
    known = [row for row in rows if row.get(query.sort) is not None]
    unknown = [row for row in rows if row.get(query.sort) is None]
    return sorted(known, key=lambda row: row[query.sort], reverse=query.down) + unknown
