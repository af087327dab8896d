"""From a request to its answer. Paths are fixed; runs and studies are looked up in the list by the query's names."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path
from typing import Any

import msgspec

from lockstep.dashboard import assets, stopping
from lockstep.dashboard.documents import Documents
from lockstep.dashboard.listing import FIGURES, Listing, Query
from lockstep.dashboard.live import Event, LiveRun
from lockstep.dashboard.security import Guard, Refused, check_folder
from lockstep.errors import InputError
from lockstep.run import Run, Spec
from lockstep.units import counted

TICK_S = 1.0
LIST_TICK_S = 2.0
# A comment line now and then, so that a closed browser is noticed.
SIGN_S = 10.0
MOST_STREAMS = 64
JSON = "application/json"
TYPES = {"js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8"}


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: Mapping[str, list[str]]
    headers: Message
    body: bytes = b""

    def one(self, name: str) -> str:
        return (self.query.get(name) or [""])[0]


@dataclass(frozen=True)
class Answer:
    body: bytes
    kind: str = "text/html; charset=utf-8"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


Events = Generator[list[Event], None, None]


class Stream:
    """Events for one page, with its permit. Closing returns the permit, also if no event was ever requested: a generator
    that was never started would not run its cleanup."""

    def __init__(self, permits: threading.BoundedSemaphore, events: Events) -> None:
        if not permits.acquire(blocking=False):
            raise Refused(503, f"more than {MOST_STREAMS} pages are open")
        self._permits, self._events, self._open = permits, events, True
        try:
            # The first events are made before the answer begins, so that an error gets an error status.
            self._first: list[list[Event]] = [next(events)]
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[list[Event]]:
        yield from self._first
        yield from self._events

    def close(self) -> None:
        if self._open:
            self._open = False
            self._permits.release()
            self._events.close()


class App:
    """One folder of runs, and who may look at it."""

    def __init__(self, root: Path, guard: Guard) -> None:
        self.guard, self.ending = guard, threading.Event()
        self._listing = Listing(root)
        self._documents = Documents(self._listing)
        self._assets = assets.scripts()
        self._streams = threading.BoundedSemaphore(MOST_STREAMS)
        self._pages: dict[str, Callable[[Request], Answer]] = {
            "/": self._list,
            "/run": self._run,
            "/study": self._study,
            "/compare": self._compare,
            "/api/runs": lambda request: _json(self._view(request)),
            "/api/report": self._report,
        }
        self._follows: dict[str, Callable[[Request], Events]] = {
            "/events/list": self._list_events,
            "/events/run": self._run_events,
            "/events/study": self._study_events,
        }
        self._changes: dict[str, Callable[[Request], Answer]] = {"/api/enter": self._enter, "/api/stop": self._stop}

    def warm(self) -> None:
        """The list, before anybody asks for it."""
        self._listing.rows()

    def answer(self, request: Request) -> Answer | Stream:
        self.guard.check_host(request.headers)
        if request.method == "POST":
            return self._change(request)
        name = request.path.removeprefix("/assets/")
        if name in self._assets and name != request.path:
            return Answer(self._assets[name], TYPES[name.rpartition(".")[2]])
        if request.path == "/assets/vega.js":
            return Answer(assets.library(), TYPES["js"])
        if request.path not in self._pages and request.path not in self._follows:
            raise Refused(404, "there is no such page")
        if request.path.startswith(("/api/", "/events/")):
            self.guard.check_same_site(request.headers)
        if not self.guard.may_look(request.headers):
            if request.path in self._follows or request.path.startswith("/api/"):
                raise Refused(401, "open the address that 'lockstep dashboard' printed")
            return Answer(assets.page("Lockstep dashboard", "enter.js", {}), status=401)
        if request.path in self._follows:
            return Stream(self._streams, self._follows[request.path](request))
        return self._pages[request.path](request)

    def _change(self, request: Request) -> Answer:
        if request.path not in self._changes:
            raise Refused(404, "there is nothing to change here")
        self.guard.check_change(request.headers)
        return self._changes[request.path](request)

    # ---------------------------------------------------------------- pages

    def _view(self, request: Request) -> dict[str, Any]:
        query = Query.of({key: found[0] for key, found in request.query.items() if found})
        return {**self._listing.view(query), "now": time.time()}

    def _list(self, request: Request) -> Answer:
        view = self._view(request)
        given = {**view, "root": str(self._listing.root), "figures": FIGURES}
        return Answer(assets.page("Lockstep dashboard", "list.js", given))

    def _run(self, request: Request) -> Answer:
        run = self._listing.run(request.one("id"))
        given = {"kind": "run", "name": run.id, "ranks": _spec(run).plan.ranks}
        return Answer(assets.page(f"{run.id} – Lockstep dashboard", "run.js", given))

    def _study(self, request: Request) -> Answer:
        name = self._listing.study(request.one("id")).name
        return Answer(assets.page(f"{name} – Lockstep dashboard", "run.js", {"kind": "study", "name": name}))

    def _compare(self, request: Request) -> Answer:
        names = [self._listing.run(name).id for name in request.query.get("id", [])]
        given = {"kind": "compare", "name": counted(len(names), "run"), "runs": names}
        return Answer(assets.page(f"{counted(len(names), 'run')} – Lockstep dashboard", "run.js", given))

    def _report(self, request: Request) -> Answer:
        study = request.one("study")
        made = self._documents.of_study(study) if study else self._documents.of_runs(request.query.get("id", []))
        return Answer(made.body, JSON, headers={"X-Lockstep-Live": "1"} if made.live else {})

    # ---------------------------------------------------------------- streams

    def _ticks(self, seconds: float) -> Iterator[None]:
        yield None
        while not self.ending.wait(seconds):
            yield None

    def _list_events(self, request: Request) -> Events:
        before: Any = None
        for _ in self._ticks(LIST_TICK_S):
            view = self._view(request)
            now = view.pop("now")
            yield [("list", {**view, "now": now})] if view != before else []
            before = view

    def _run_events(self, request: Request) -> Events:
        run = self._listing.run(request.one("id"))
        check_folder(self._listing.root, run.folder)
        spec = _spec(run)
        rank = request.one("rank") or "0"
        if not re.fullmatch("[0-9]{1,9}", rank) or int(rank) >= spec.plan.ranks:
            raise Refused(400, f"rank: 0 to {spec.plan.ranks - 1}")
        live = LiveRun(self._listing.root, run, spec, int(rank))
        for _ in self._ticks(TICK_S):
            events = live.look()
            yield events
            if events and events[-1][0] == "ended":
                return

    def _study_events(self, request: Request) -> Events:
        name = self._listing.study(request.one("id")).name
        before: Any = None
        for _ in self._ticks(LIST_TICK_S):
            line = next((each for each in self._listing.studies() if each["name"] == name), None)
            yield [("study", line)] if line != before else []
            before = line

    # ---------------------------------------------------------------- changes

    def _enter(self, request: Request) -> Answer:
        return _json({"entered": True}, {"Set-Cookie": self.guard.cookie()})

    def _stop(self, request: Request) -> Answer:
        try:
            name = msgspec.json.decode(request.body, type=dict[str, str]).get("id", "")
        except (ValueError, RecursionError):  # not JSON, or not UTF-8, or nested without end
            raise Refused(400, 'send {"id": "the run"}') from None
        run = self._listing.run(name)
        check_folder(self._listing.root, run.folder)
        try:
            stopped = stopping.stop(run)
        except stopping.CannotStop as reason:
            raise Refused(409, f"this run is not stopped from here: {reason}") from None
        return _json({"stopping": run.id, "pid": stopped.pid})


def _spec(run: Run) -> Spec:
    try:
        return run.spec()
    except InputError as error:
        raise Refused(409, str(error)) from None


def _json(value: object, headers: dict[str, str] | None = None) -> Answer:
    return Answer(msgspec.json.encode(value), JSON, headers=headers or {})
