"""A contender that is a placement: all its ranks, started by its launcher as a run would be, and asked for windows (training/turns.py)."""

from __future__ import annotations

import json
import os
import select
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from lockstep.errors import InputError, LockstepError
from lockstep.launch import execute, prepare
from lockstep.lines import LOOK_S, Desk, Lines, Pipes
from lockstep.measure.memory import available_bytes
from lockstep.placement import Placement
from lockstep.recipe import Recipe
from lockstep.rounds import LINGER_S
from lockstep.run import Options, Run, Spec
from lockstep.turns.contender import ContenderFailed, Taken
from lockstep.units import counted

# How long the ranks of a placement may take to start (many may start side by side), unless a race has less time.
START_S = 180.0
# How long a window may take beyond its steps. Those take no longer than MANY_TIMES the slowest seen. Until all that belongs together was
# seen, UNSEEN_STEPS of them may take SLOWEST_STEP_S each as well.
WINDOW_S, MANY_TIMES = 60.0, 20.0
SLOWEST_STEP_S, UNSEEN_STEPS = 60.0, 10
EVALUATION_S = 600.0
# Of one rank: Python, torch, a small net and its data.
RANK_BYTES = 300 << 20
# Ranks that were told to leave are gone in a moment; after this they are ended.
LEAVE_S = 10.0


def memory_problem(placements: Iterable[Placement]) -> str | None:
    """Why they cannot all be alive at the same time, as the contenders of a race are."""
    ranks = [placement.ranks for placement in placements]
    available = available_bytes()
    if not available or sum(ranks) * RANK_BYTES <= available:
        return None
    return (
        f"{counted(len(ranks), 'contender')} with {counted(sum(ranks), 'rank')}, all alive at the same time, need about {sum(ranks) * RANK_BYTES / 2**30:.1f} GiB of "
        f"memory, and {available / 2**30:.1f} GiB are free: name fewer"
    )


class Look(NamedTuple):
    """What of a training is not in its steps; None where it is not known."""

    evaluation: float | None
    """Seconds of one evaluation, of the slowest rank."""
    memory: float | None
    """Bytes by which all ranks together have grown."""
    memory_of_a_rank: float | None
    """Of the rank that has grown most."""
    tensor_memory: float | None
    """Bytes of the tensors of all ranks at the peak of a step."""


class Ranks:
    """All ranks of a placement. Every start has a run folder of its own within `folder`, which is gone when that start has ended well."""

    def __init__(
        self,
        name: str,
        recipe: Recipe,
        placement: Placement,
        folder: Path,
        options: Options | None = None,
        ended: Callable[[Run], None] = lambda run: None,
        start_s: float = START_S,
    ) -> None:
        """`ended` is given the folder of a start that has ended well, before it goes. `start_s`: how long a start may take."""
        self.name, self._ended = name, ended
        self._recipe, self._placement, self._folder = recipe, placement, folder
        self._options = msgspec.structs.replace(options or Options(), save_model=False, turns=True)
        self._run: Run | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._problem: BaseException | None = None
        self._lines: Lines | None = None
        self._pending: list[bytes] = []
        self._lingers = 0.0
        self.whole_steps = 1
        self._start_s = start_s
        self._step_s, self._has_seen_all = 0.0, False

    def start(self, number: int) -> None:
        run, spec = prepare(self._recipe, self._placement, self._options, self._folder, f"{number:03d}")
        self._run, self._problem = run, None
        ranks, placement = spec.plan.ranks, spec.placement
        self._lingers = LINGER_S if (placement.threads or 1) > 1 else 0.0
        if placement.launcher == "ray" and placement.ray.address is not None:
            raise InputError("ranks that take turns are asked through files of this host: leave ray.address out")
        slurm = placement.launcher == "slurm"
        self._lines = Desk(run, ranks, placement.hosts > 1) if slurm else Pipes(run, ranks)
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
        assert self._lines is not None
        until = time.monotonic() + self._start_s
        late = f"it was not ready within {self._start_s:.0f} s"
        if self._start_s < START_S:
            late += ": if that is how long it takes, give the race a longer --budget"
        self._lines.join(lambda: self._check(until, late))
        self.whole_steps = int(self._collect(until - time.monotonic(), late)[0].get("whole_steps", 1))

    def take(self, lead: int, steps: int) -> Taken:
        self._order({"lead": lead, "steps": steps})
        found = self._collect(self._limit(lead + steps))
        time.sleep(self._lingers)
        wall = max(answer["wall"] for answer in found)
        self._step_s = max(self._step_s, wall / steps)
        self._has_seen_all |= steps >= self.whole_steps
        phases = [answer["phases"] for answer in found]
        return Taken(
            samples=found[0]["samples"],
            wall=wall,
            cpu=sum(answer["cpu"] for answer in found),
            used=sum(answer["used"] for answer in found),
            waited=sum(answer["waited"] for answer in found),
            phases={phase: sum(each[phase] for each in phases) / len(phases) for phase in phases[0]},
        )

    def _limit(self, steps: int) -> float:
        """Seconds that this many steps may take. A script's own evaluation may come between two of them."""
        beyond = EVALUATION_S if self._options.script else WINDOW_S
        if not self._has_seen_all:  # an exchange may still come
            beyond += SLOWEST_STEP_S * min(steps, UNSEEN_STEPS)
        return beyond + MANY_TIMES * self._step_s * steps

    def look(self) -> Look:
        """Test the model once, and see how much memory all ranks together have needed since they were ready."""
        self._order({"look": True})
        found = self._collect(EVALUATION_S)
        seconds, growths = [answer["evaluation"] for answer in found], [answer["memory"] for answer in found]
        # After the growth was read: a profiler takes memory of its own.
        # Of steps that belong together the last one is counted: it has the exchange.
        self._order({"lead": self.whole_steps - 1, "steps": 1, "tensors": True})
        tensors = [answer["tensors"] for answer in self._collect(self._limit(self.whole_steps))]
        known = None not in growths
        return Look(
            None if None in seconds else max(seconds),
            float(sum(growths)) if known else None,
            float(max(growths)) if known else None,
            None if None in tensors else float(sum(tensors)),
        )

    def _order(self, document: dict[str, Any]) -> None:
        assert self._lines is not None
        for end in self._lines.orders.values():
            with suppress(OSError):  # a rank that is gone is missed where its answer is
                os.write(end, json.dumps(document).encode() + b"\n")

    def _collect(self, limit_s: float, late: str = "") -> list[dict[str, Any]]:
        """One answer of every rank; `late` says what is wrong where one has not come by then."""
        late = late or f"no answer within {limit_s:.0f} s"
        assert self._lines is not None
        ends = {end: rank for rank, end in self._lines.answers.items()}
        answers, hung_up = dict[int, dict[str, Any]](), set[int]()
        until = time.monotonic() + limit_s
        while len(answers) < len(ends):
            readable, _, _ = select.select([end for end in ends if end not in hung_up], [], [], LOOK_S)
            for end in readable:
                rank = ends[end]
                try:
                    data = os.read(end, 1 << 16)
                except ConnectionError:
                    data = b""
                if not data:
                    hung_up.add(end)
                self._pending[rank] += data
                line, newline, rest = self._pending[rank].partition(b"\n")
                if newline:
                    answers[rank], self._pending[rank] = json.loads(line), rest
            if not readable:
                self._check(until, late)
        return [answers[rank] for rank in sorted(answers)]

    def _check(self, until: float, late: str) -> None:
        assert self._thread is not None
        if not self._thread.is_alive():
            if isinstance(self._problem, InputError):
                raise self._problem
            if self._problem is None:
                raise ContenderFailed("its ranks ended by themselves")
            text = str(self._problem) if isinstance(self._problem, LockstepError) else repr(self._problem)
            raise ContenderFailed(text.removeprefix("run failed: ").partition("; what was measured is in ")[0])
        if time.monotonic() > until:
            raise ContenderFailed(late)

    def end(self) -> None:
        """An order without steps lets the ranks part."""
        if self._lines is not None:
            self._order({})
        if self._thread is not None:
            self._thread.join(LEAVE_S)
            self._stop.set()
            self._thread.join()
        if self._lines is not None:
            self._lines.close()
        self._lines = self._thread = None
        if self._run is not None and self._problem is None:
            try:
                self._ended(self._run)
            except LockstepError as error:  # others have still to be ended
                self._problem = error
        if self._run is not None and self._problem is None:
            shutil.rmtree(self._run.folder, ignore_errors=True)
        self._run = None
