"""How ranks are given orders: a line of JSON for each order and each answer, over something that a rank can wait at without using a processor.

Ranks on this host have two named pipes each, in their folders. Ranks that Slurm starts may be on other hosts, and call a desk: a TCP port of ours,
whose address and password are in a file of the folder, which only its owner can read, or in the ranks' environment, where the folder itself is in
question.
"""

from __future__ import annotations

import hmac
import json
import os
import platform
import queue
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any, Protocol, cast

from lockstep.run import ANSWERS, DESK, ORDERS, Run, read_json, writing

DESK_VARIABLE = "LOCKSTEP_DESK"
CALL_S = 10.0
LOOK_S = 0.5
PASSWORD_BYTES = 32
LOOPBACK = "127.0.0.1"
# A caller says who it is in one short line, at once.
GREETING_BYTES, GREETING_S = 1000, 10.0
# Others may call before a rank does.
STRANGERS = 100


class Lines(Protocol):
    @property
    def orders(self) -> dict[int, int]:
        """File descriptors to write to, by rank: of the ranks that can be told something."""

    @property
    def answers(self) -> dict[int, int]:
        """File descriptors to read from, by rank."""

    def join(self, waiting: Callable[[], None]) -> None:
        """Until every rank is there; `waiting` is called in between, and raises when it has been too long."""

    def close(self) -> None: ...


class Pipes:
    """Two named pipes for each rank, all on this host."""

    def __init__(self, run: Run, ranks: int) -> None:
        self.orders: dict[int, int] = {}
        self.answers: dict[int, int] = {}
        for rank in range(ranks):
            for name, ends in ((ORDERS, self.orders), (ANSWERS, self.answers)):
                os.mkfifo(run.rank_folder(rank) / name, 0o600)
                # Opened both ways, so that opening waits for nobody; only our own end counts for the rank's reader.
                ends[rank] = os.open(run.rank_folder(rank) / name, os.O_RDWR | os.O_NONBLOCK)

    def join(self, waiting: Callable[[], None]) -> None:
        """Whoever opens a pipe later finds what was written."""

    def close(self) -> None:
        for end in (*self.orders.values(), *self.answers.values()):
            os.close(end)


class Desk:
    """A TCP port that ranks call, from whichever host they are on. A caller without the password is hung up on."""

    def __init__(self, run: Run, ranks: int, beyond_this_host: bool) -> None:
        self._callers: list[socket.socket | None] = [None] * ranks
        self._password = secrets.token_hex(PASSWORD_BYTES)
        self._listener = socket.create_server(("" if beyond_this_host else LOOPBACK, 0), backlog=ranks + STRANGERS)
        names = [LOOPBACK, platform.node()] if beyond_this_host else [LOOPBACK]
        port = self._listener.getsockname()[1]
        self.address = json.dumps({"hosts": names, "node": platform.node(), "port": port, "password": self._password})
        with writing(run.folder):
            end = os.open(run.folder / DESK, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(end, "w") as file:
                file.write(self.address)

    @property
    def orders(self) -> dict[int, int]:
        return {rank: caller.fileno() for rank, caller in enumerate(self._callers) if caller}

    @property
    def answers(self) -> dict[int, int]:
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
                if not (more := caller.recv(1)):  # no more than its line: what follows are answers
                    break
                said += more
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


class Line:
    """A rank's end: orders come, and each gets an answer. Waiting for an order takes no processor."""

    def __init__(self, run: Run, rank: int) -> None:
        stated, folder = os.environ.get(DESK_VARIABLE), run.rank_folder(rank)
        desk = json.loads(stated) if stated else read_json(run.folder / DESK)
        if desk:
            self._orders, self._answers = _call(desk, rank)
        else:
            # Not blocking: if nobody holds the other end any more, reading ends at once instead of waiting forever.
            end = os.open(folder / ORDERS, os.O_RDONLY | os.O_NONBLOCK)
            os.set_blocking(end, True)
            self._orders = os.fdopen(end, "rb")
            self._answers = (folder / ANSWERS).open("wb", buffering=0)

    def order(self) -> dict[str, Any]:
        """The next one; an empty one is the last."""
        found: dict[str, Any] = json.loads(self._orders.readline() or "{}")
        if not found:
            self._orders.close()
            self._answers.close()
        return found

    def answer(self, document: dict[str, Any]) -> None:
        data = memoryview(json.dumps(document).encode() + b"\n")
        while data:
            data = data[self._answers.write(data) :]


class Leash:
    """A line that holds its process: when the other end closes, whoever gave the orders is gone, and the process ends at once, also where it
    hangs in a collective."""

    def __init__(self, run: Run, rank: int) -> None:
        self._line = Line(run, rank)
        self._orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with suppress(OSError):
            while order := self._line.order():
                self._orders.put(order)
        os._exit(0)

    def order(self) -> dict[str, Any]:
        return self._orders.get()

    def answer(self, document: dict[str, Any]) -> None:
        self._line.answer(document)


def _call(desk: dict[str, Any], rank: int) -> tuple[IO[bytes], IO[bytes]]:
    """The desk, by the first of its addresses that answers."""
    problem: OSError | None = None
    for host in desk["hosts"]:
        if host == LOOPBACK and desk["node"] != platform.node():
            continue  # another machine's: whoever listens there is a stranger, and would learn the password
        try:
            line = socket.create_connection((host, desk["port"]), timeout=CALL_S)
        except OSError as error:
            problem = error
            continue
        line.settimeout(None)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.sendall(json.dumps({"rank": rank, "password": desk["password"]}).encode() + b"\n")
        return line.makefile("rb"), cast("IO[bytes]", line.makefile("wb", buffering=0))
    raise ConnectionError(
        f"whoever gives the orders, at {', '.join(desk['hosts'])}, cannot be reached from here: {problem}"
    )
