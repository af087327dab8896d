"""A contender that is a placement: all its ranks, started by its launcher as a run would be, and asked by named pipes (training/turns.py)."""

from __future__ import annotations

import json
import os
import select
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from lockstep.errors import InputError, LockstepError
from lockstep.launch import execute, prepare
from lockstep.placement import Placement
from lockstep.recipe import Recipe
from lockstep.run import ANSWERS, ORDERS, Options, Run, Spec
from lockstep.turns.contender import ContenderFailed, Taken

# How long the ranks of a placement may take to start, and a window beyond what its steps should take.
START_S = 60.0
WINDOW_S = 60.0
EVALUATION_S = 600.0
LOOK_S = 0.5
# Ranks that were told to leave are gone in a moment; after this they are ended.
LEAVE_S = 10.0


class Look(NamedTuple):
    """What of a training is not in its steps; None where it is not known."""

    evaluation: float | None
    """Seconds of one evaluation, of the slowest rank."""
    memory: float | None
    """Bytes by which all ranks together have grown."""


class Ranks:
    """All ranks of a placement. Every start has a run folder of its own within `folder`, which is gone when that start has ended well."""

    def __init__(
        self, name: str, recipe: Recipe, placement: Placement, folder: Path, options: Options | None = None
    ) -> None:
        self.name = name
        self._recipe, self._placement, self._folder = recipe, placement, folder
        self._options = msgspec.structs.replace(options or Options(), save_model=False, turns=True)
        self._run: Run | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._problem: BaseException | None = None
        self._orders: list[int] = []
        self._answers: list[int] = []
        self._pending: list[bytes] = []

    def start(self, number: int) -> None:
        run, spec = prepare(self._recipe, self._placement, self._options, self._folder, f"{number:03d}")
        self._run, self._problem = run, None
        for rank in range(spec.plan.ranks):
            for name, ends in ((ORDERS, self._orders), (ANSWERS, self._answers)):
                os.mkfifo(run.rank_folder(rank) / name, 0o600)
                # Opened both ways, so that opening waits for nobody; only our own end counts for the rank's reader.
                ends.append(os.open(run.rank_folder(rank) / name, os.O_RDWR | os.O_NONBLOCK))
        self._pending = [b""] * spec.plan.ranks
        self._stop.clear()
        self._thread = threading.Thread(target=self._watch, args=(run, spec), name="race", daemon=True)
        self._thread.start()

    def _watch(self, run: Run, spec: Spec) -> None:
        try:
            execute(run, spec, stop=self._stop)
        except BaseException as error:  # told by whoever waits for an answer
            self._problem = error

    def ready(self) -> None:
        self._collect(START_S)

    def take(self, lead: int, steps: int) -> Taken:
        order = json.dumps({"lead": lead, "steps": steps}).encode() + b"\n"
        for end in self._orders:
            os.write(end, order)
        found = self._collect(WINDOW_S)
        phases = [answer["phases"] for answer in found]
        return Taken(
            samples=found[0]["samples"],
            wall=max(answer["wall"] for answer in found),
            cpu=sum(answer["cpu"] for answer in found),
            used=sum(answer["used"] for answer in found),
            phases={phase: sum(each[phase] for each in phases) / len(phases) for phase in phases[0]},
        )

    def look(self) -> Look:
        """Test the model once, and see how much memory all ranks together have needed since they were ready."""
        for end in self._orders:
            os.write(end, b'{"look": true}\n')
        found = self._collect(EVALUATION_S)
        seconds, growths = [answer["evaluation"] for answer in found], [answer["memory"] for answer in found]
        return Look(None if None in seconds else max(seconds), None if None in growths else float(sum(growths)))

    def _collect(self, limit_s: float) -> list[dict[str, Any]]:
        """One answer of every rank."""
        answers: dict[int, dict[str, Any]] = {}
        until = time.monotonic() + limit_s
        while len(answers) < len(self._answers):
            readable, _, _ = select.select(self._answers, [], [], LOOK_S)
            for end in readable:
                rank = self._answers.index(end)
                self._pending[rank] += os.read(end, 1 << 16)
                line, newline, rest = self._pending[rank].partition(b"\n")
                if newline:
                    answers[rank], self._pending[rank] = json.loads(line), rest
            if not readable:
                self._check(until, limit_s)
        return [answers[rank] for rank in sorted(answers)]

    def _check(self, until: float, limit_s: float) -> None:
        assert self._thread is not None
        if not self._thread.is_alive():
            if isinstance(self._problem, InputError):
                raise self._problem
            if self._problem is None:
                raise ContenderFailed("its ranks ended by themselves")
            text = str(self._problem) if isinstance(self._problem, LockstepError) else repr(self._problem)
            raise ContenderFailed(text.removeprefix("run failed: ").partition("; what was measured is in ")[0])
        if time.monotonic() > until:
            raise ContenderFailed(f"no answer within {limit_s:g} s")

    def end(self) -> None:
        """An order without steps lets the ranks part."""
        for end in self._orders:
            with suppress(OSError):
                os.write(end, b"{}\n")
        if self._thread is not None:
            self._thread.join(LEAVE_S)
            self._stop.set()
            self._thread.join()
        for end in (*self._orders, *self._answers):
            os.close(end)
        self._orders, self._answers, self._thread = [], [], None
        if self._run is not None and self._problem is None:
            shutil.rmtree(self._run.folder, ignore_errors=True)
        self._run = None
