"""A contender that is a foreign program: frozen between windows by SIGSTOP, thawed by SIGCONT. A step is a line that it prints.

It has a terminal of its own, so that lines come when they are printed, not when a buffer is full; a progress bar's carriage return ends a line
too. Its last lines are kept for the case that it fails.
"""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from lockstep.text import printable
from lockstep.turns import guard
from lockstep.turns.contender import ContenderFailed, Taken
from lockstep.turns.guard import NOT_STARTED, descendants, send

# How long it may be silent: until its first line, and between two lines.
START_S, LINE_S = 300.0, 60.0
END_S = 5.0
KEPT_LINES = 3


class Command:
    """`images`: how many are trained from one line to the next; where that is not known, lines are compared."""

    whole_steps = 1

    def __init__(self, name: str, argv: Sequence[str], images: float = 1.0, start_s: float = START_S) -> None:
        self.name, self._start_s = name, start_s
        self._argv, self._images = list(argv), images
        self._guard: subprocess.Popen[bytes] | None = None
        self._terminal = -1
        self._line, self._last = b"", deque[str](maxlen=KEPT_LINES)

    def start(self, number: int) -> None:
        self._terminal, its_end = pty.openpty()
        self._line = b""
        try:
            self._guard = subprocess.Popen(
                [sys.executable, "-P", guard.__file__, *self._argv],
                env={**guard.environment(), "TERM": "dumb", "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=its_end,
                stderr=its_end,
                start_new_session=True,
            )
        finally:
            os.close(its_end)

    def ready(self) -> None:
        self._await_lines(1, self._start_s)
        self._send(signal.SIGSTOP)

    def take(self, lead: int, steps: int) -> Taken:
        asked = self._used()
        self._send(signal.SIGCONT)
        self._await_lines(lead, LINE_S)
        cpu, begin = self._used(), time.perf_counter()
        lines = self._await_lines(steps, LINE_S)
        wall, now = time.perf_counter() - begin, self._used()
        self._send(signal.SIGSTOP)
        return Taken(samples=lines * self._images, wall=wall, cpu=now - cpu, used=now - asked)

    def end(self) -> None:
        if self._guard is not None:
            guard.end(self._guard, END_S)  # frozen processes, too
            self._guard = None
        if self._terminal >= 0:
            os.close(self._terminal)
            self._terminal = -1

    def _send(self, sign: signal.Signals) -> None:
        assert self._guard is not None
        send(self._guard.pid, sign)

    def _used(self) -> float:
        assert self._guard is not None
        return sum(process.cpu for process in descendants(self._guard.pid))

    def _await_lines(self, count: int, limit_s: float) -> int:
        """How many came: a program may print several at once."""
        seen = 0
        while seen < count:
            readable, _, _ = select.select([self._terminal], [], [], limit_s)
            if not readable:
                raise ContenderFailed(f"it printed nothing for {limit_s:.0f} s, and a step is a line that it prints")
            try:
                data = os.read(self._terminal, 1 << 16)
            except OSError:  # the last process that could write has ended
                data = b""
            if not data:
                raise ContenderFailed(self._how_it_ended())
            *lines, self._line = (self._line + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
            said = [line for line in lines if line.strip()]
            self._last.extend(printable(line.decode(errors="replace")) for line in said)
            seen += len(said)
        return seen

    def _how_it_ended(self) -> str:
        assert self._guard is not None
        with suppress(subprocess.TimeoutExpired):
            self._guard.wait(END_S)
        code = self._guard.returncode
        if code == NOT_STARTED and self._last:
            return self._last[-1]
        last = f": {self._last[-1]}" if code and self._last else ""
        return (
            f"it ended in mid-race with exit code {code}{last}"
            if code
            else "it came to its end in mid-race: let it train longer"
        )
