"""How a race talks to ranks: a line of JSON for each order and each answer, over something that a rank can wait at without using a processor.

Ranks on this host have two named pipes each, in their folders. Ranks that Slurm starts may be on other hosts, and call a desk: a TCP port of ours,
whose address and password are in the run's folder, which only its owner can read.
"""

from __future__ import annotations

import hmac
import json
import os
import platform
import secrets
import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from lockstep.run import ANSWERS, DESK, ORDERS, Run, writing

LOOK_S = 0.5
PASSWORD_BYTES = 32
# A caller says who it is in one short line, at once.
GREETING_BYTES, GREETING_S = 1000, 10.0
# Others may call before a rank does.
STRANGERS = 100


class Lines(Protocol):
    @property
    def orders(self) -> list[int]:
        """File descriptors to write to, by rank."""

    @property
    def answers(self) -> list[int]:
        """File descriptors to read from, by rank."""

    def join(self, waiting: Callable[[], None]) -> None:
        """Until every rank is there; `waiting` is called in between, and raises when it has been too long."""

    def close(self) -> None: ...


class Pipes:
    """Two named pipes for each rank, all on this host."""

    def __init__(self, run: Run, ranks: int) -> None:
        self.orders: list[int] = []
        self.answers: list[int] = []
        for rank in range(ranks):
            for name, ends in ((ORDERS, self.orders), (ANSWERS, self.answers)):
                os.mkfifo(run.rank_folder(rank) / name, 0o600)
                # Opened both ways, so that opening waits for nobody; only our own end counts for the rank's reader.
                ends.append(os.open(run.rank_folder(rank) / name, os.O_RDWR | os.O_NONBLOCK))

    def join(self, waiting: Callable[[], None]) -> None:
        """Whoever opens a pipe later finds what was written."""

    def close(self) -> None:
        for end in (*self.orders, *self.answers):
            os.close(end)


class Desk:
    """A TCP port that ranks call, from whichever host they are on. A caller without the password is hung up on."""

    def __init__(self, run: Run, ranks: int, beyond_this_host: bool) -> None:
        self._callers: list[socket.socket | None] = [None] * ranks
        self._password = secrets.token_hex(PASSWORD_BYTES)
        self._listener = socket.create_server(("" if beyond_this_host else "127.0.0.1", 0), backlog=ranks + STRANGERS)
        names = ["127.0.0.1", platform.node()] if beyond_this_host else ["127.0.0.1"]
        content = {"hosts": names, "port": self._listener.getsockname()[1], "password": self._password}
        with writing(run.folder):
            end = os.open(run.folder / DESK, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(end, "w") as file:
                json.dump(content, file)

    @property
    def orders(self) -> list[int]:
        return [caller.fileno() for caller in self._callers if caller]

    @property
    def answers(self) -> list[int]:
        return self.orders

    def join(self, waiting: Callable[[], None]) -> None:
        while None in self._callers:
            readable, _, _ = select.select([self._listener], [], [], LOOK_S)
            if readable:
                self._answer_call(self._listener.accept()[0])
            else:
                waiting()
        self._listener.close()

    def _answer_call(self, caller: socket.socket) -> None:
        caller.settimeout(GREETING_S)
        said = b""
        until = time.monotonic() + GREETING_S
        with suppress(OSError, ValueError, KeyError, TypeError):
            while not said.endswith(b"\n") and len(said) < GREETING_BYTES and time.monotonic() < until:
                said += caller.recv(1)  # no more than its line: what follows are answers
            greeting = json.loads(said)
            known = hmac.compare_digest(str(greeting["password"]), self._password)
            rank = greeting["rank"]
            if known and isinstance(rank, int) and 0 <= rank < len(self._callers) and self._callers[rank] is None:
                caller.setblocking(True)
                caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._callers[rank] = caller
                return
        caller.close()

    def close(self) -> None:
        self._listener.close()
        for caller in self._callers:
            if caller:
                caller.close()
