"""What a foreign rank writes into the run folder: its rows, signs of life with what is known of it, and why it failed."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import get_ident
from time import perf_counter_ns
from typing import Any

from . import launchers
from .clock import FORWARD, LOGGING, Clock
from .rows import Rows
from .standins import in_place_of

BEAT_NS = 1_000_000_000
# More than a core's own caches hold.
COLD_BYTES = 4 << 20
STATE = "attached"
"""Of a rank in its sign of life: nobody expects the next one at a certain time, because a script may be busy with anything."""
SEEN = "attached"
"""The key in its sign of life under which it tells what is known of the script."""


def complain(text: str) -> None:
    """One line, and the script goes on."""
    with suppress(AttributeError, OSError, ValueError):  # the script has closed it
        sys.stderr.write(f"lockstep attach: {text}\n")


class Recorder:
    """Opens its files with the first step: a process that never trains leaves nothing."""

    def __init__(self, run: str) -> None:
        self._run = run
        self.clock = Clock(self._finished, self._aside)
        self.seen: dict[str, Any] = {}
        """What the hooks have found out about the script."""
        self.before_beat: Callable[[], None] = lambda: None
        self._rows: Rows | None = None
        self._folder = ""
        self._rank = 0
        self._beat_at = 0
        self._event_ns = self._pass_ns = 0.0
        self._logging = False

    def inset(self, function: Any, kind: int, note: Callable[..., None] | None = None) -> Any:
        """What stands in for a function that may be called anywhere in a step: its time is a part of its own. `note` is called before, with
        what the function is a method of."""
        clock = self.clock

        @in_place_of(function)
        def timed(*args: Any, **keywords: Any) -> Any:
            if get_ident() != clock.thread:
                return function(*args, **keywords)
            if note is not None:
                note(args[0])
            if clock.stack and clock.stack[-1] == kind:
                return function(*args, **keywords)
            clock.inset(kind)
            try:
                return function(*args, **keywords)
            finally:
                clock.leave()

        return timed

    def logging(self, function: Any, values: Callable[..., Mapping[str, Any]]) -> Any:
        """The same for a function that logs. `values` finds them among its arguments. What it calls in turn logs the same once more."""
        clock = self.clock

        @in_place_of(function)
        def logged(*args: Any, **keywords: Any) -> Any:
            if get_ident() != clock.thread or self._logging:
                return function(*args, **keywords)
            self._logging = True
            clock.inset(LOGGING)
            try:
                found = function(*args, **keywords)
                self._keep(values, args, keywords)
                return found
            finally:
                clock.leave()
                self._logging = False

        return logged

    def _keep(self, values: Callable[..., Mapping[str, Any]], args: Any, keywords: Any) -> None:
        """After it was logged: whoever logs a value has waited for it already."""
        try:
            if self._rows is not None:
                numbers = {
                    str(name): number
                    for name, value in values(*args, **keywords).items()
                    if (number := _number(value)) is not None
                }
                if numbers:
                    self._rows.log(self.clock.steps, numbers)
        except Exception as error:
            complain(f"what was logged is not kept: {type(error).__name__}: {error}")

    def _finished(self, start: int, phases: list[int], total: int, beside: list[int], again: bool) -> None:
        try:
            if self._rows is None and not self._open():
                return
            assert self._rows is not None
            self._rows.write(start, phases, total, beside, again)
            now = perf_counter_ns()
            if now >= self._beat_at:
                self._beat_at = now + BEAT_NS
                self._beat(STATE)
        except Exception as error:
            self.give_up(error)

    def _aside(self, evaluation: int, checkpoint: int) -> None:
        try:
            if self._rows is not None:
                self._rows.aside(evaluation, checkpoint)
        except Exception as error:
            self.give_up(error)

    def give_up(self, error: BaseException | str) -> None:
        """Whatever is wrong with us is not the script's business."""
        self.clock.thread = 0
        what = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        complain(f"this process (pid {os.getpid()}) is not recorded any more: {what}")

    def forked(self) -> None:
        """A forked child is not the rank that its parent is."""
        self.clock.thread = 0
        self._rows = None

    def _open(self) -> bool:
        launcher, self._rank, world = self._place()
        self._folder = os.path.join(self._run, "ranks", f"{self._rank:04d}")
        os.makedirs(self._folder, exist_ok=True)
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and os.path.exists(self._path("steps.bin")):
            os.unlink(self._path("steps.bin"))  # torchrun has started this rank anew: its record begins anew
        try:
            self._rows = Rows(self._folder)
        except FileExistsError:
            self.give_up(f"another process of this command is rank {self._rank} already")
            return False
        self._event_ns, self._pass_ns = prices()
        self.seen |= {"launcher": launcher, "world": world, **_surroundings()}
        return True

    def _place(self) -> tuple[str, int, int]:
        """As torch.distributed says, where the script has set it up; else as the launcher says."""
        told = launchers.place()
        dist = sys.modules.get("torch.distributed")
        if dist is not None and dist.is_available() and dist.is_initialized():
            self.seen["backend"] = str(dist.get_backend())
            return told[0] if told else "spawn", dist.get_rank(), dist.get_world_size()
        return told or ("single", 0, 1)

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, name)

    def _beat(self, state: str) -> None:
        self.before_beat()
        clock = self.clock
        spent = clock.events * self._event_ns + clock.passed * self._pass_ns + clock.own
        self.seen["hook_seconds"] = spent / 1e9
        self._write(
            "status.json",
            {
                "rank": self._rank,
                "state": state,
                "time": time.time(),
                "pid": os.getpid(),
                "host": platform.node(),
                "step": self.clock.steps,
                SEEN: self.seen,
            },
        )

    def keep(self, name: str, content: dict[str, Any]) -> None:
        """A file of the rank's own."""
        if self._rows is not None:
            self._write(name, content)

    def _write(self, name: str, content: dict[str, Any]) -> None:
        """A reader sees the old file or the new one."""
        temporary = self._path(f".tmp-{os.getpid()}-{name}")
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(content, file)
        os.replace(temporary, self._path(name))

    def close(self) -> None:
        """At the end of the process, if it comes to one."""
        try:
            if not self.clock.thread:
                return
            self._account()
            if self._rows is not None:
                self._rows.close()
                self._beat("done")
        except Exception as error:
            self.give_up(error)

    def _account(self) -> None:
        """The error that nobody caught. What a launcher raises for its ranks, and what a helper process does, are no causes."""
        error = getattr(sys, "last_value", None)
        multiprocessing = sys.modules.get("multiprocessing")
        helper = multiprocessing is not None and multiprocessing.parent_process() is not None
        if error is None or type(error).__name__ in _OF_LAUNCHERS or (helper and self._rows is None):
            return
        if not self._folder:
            self._rank = self._place()[1]
            self._folder = os.path.join(self._run, "ranks", f"{self._rank:04d}")
            os.makedirs(self._folder, exist_ok=True)
        lines = str(error).strip().splitlines()
        content = {
            "rank": self._rank,
            "time": time.time(),
            "kind": type(error).__name__,
            "message": lines[0] if lines else "",
            "exit_code": 1,
            "consequence": False,
            "step": self.clock.steps,
        }
        if not os.path.exists(self._path("failure.json")):
            self._write("failure.json", content)


_OF_LAUNCHERS = ("ChildFailedError", "CalledProcessError", "KeyboardInterrupt", "SystemExit")


def _number(value: Any) -> float | None:
    """A value as it was logged, if it is one number: what is logged may be text, pictures or anything."""
    try:
        if isinstance(value, (str, bytes, bool)) or (hasattr(value, "numel") and value.numel() != 1):
            return None
        found = float(value)
    except Exception:
        return None
    return found if math.isfinite(found) else None


def _surroundings() -> dict[str, Any]:
    torch = sys.modules["torch"]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    numpy = sys.modules.get("numpy")
    return {
        **({"numpy": str(numpy.__version__)} if numpy is not None else {}),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "threads": int(torch.get_num_threads()),
        "cores": cores,
    }


def prices(times: int = 21) -> tuple[float, float]:
    """Nanoseconds of a region, and of passing a call on: measured here, because machines differ.

    Between two regions a script computes, which drives Python's part of the caches out. Code that comes back to cold caches takes several
    times as long, so this makes them cold before every call.
    """
    clock = Clock(lambda *_: None, lambda *_: None)

    def nothing(*args: Any, **keywords: Any) -> None:
        return None

    def passed(*args: Any, **keywords: Any) -> None:
        if clock.busy or get_ident() != clock.thread:
            return nothing(*args, **keywords)

    def timed(*args: Any, **keywords: Any) -> None:
        if get_ident() == clock.thread:
            return
        clock.work(FORWARD)
        try:
            nothing(*args, **keywords)
        finally:
            clock.leave()

    block = bytearray(COLD_BYTES)
    medians = []
    for function in (nothing, passed, timed):
        taken = []
        for _ in range(times):
            bytes(block)
            begin = perf_counter_ns()
            function(clock)
            taken.append(perf_counter_ns() - begin)
        medians.append(sorted(taken)[times // 2])
    return max(0.0, medians[2] - medians[0]), max(0.0, medians[1] - medians[0])
