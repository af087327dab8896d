"""The zygote: a process that has imported torch once, and forks what tests start.

Importing torch takes 1.7 s of a processor; a fork takes 0.05 s. Tests start over a thousand processes that need it. For tests
only: what users run starts cold, and so do tests marked `cold` (faults, process identity), Slurm's and MPI's ranks, and emulated hosts.

    python server.py SOCKET     says "ready" when it can be asked; ends when its standard input closes
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import resource
import selectors
import signal
import socket
import sys
import time
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import sitecustomize

PRELOADED = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel.distributed",
    "numpy",
    "click",
    "rich.console",
    "rich.table",
    "lockstep.cli.run",
    "lockstep.measure.environment",
    "lockstep.training.assemble",
)


class Zygote:
    """Accepts requests and forks; in a forked process `serve` returns what that process is to run."""

    def __init__(self, address: str) -> None:
        self._surroundings = sitecustomize.surroundings()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(64)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(sys.stdin.buffer, selectors.EVENT_READ, "parent")
        self._children: dict[socket.socket, tuple[int, int]] = {}

    def serve(self) -> Callable[[], None] | None:
        while True:
            for key, _ in self._selector.select():
                if key.data == "parent":
                    self._end()
                    return None
                if key.data is None:
                    forked = self._accept()
                    if forked is not None:
                        return forked
                elif isinstance(key.data, socket.socket):
                    self._reap(key.data)
                else:
                    self._forward(key.fileobj)

    def _accept(self) -> Callable[[], None] | None:
        connection, _ = self._listener.accept()
        connection.settimeout(10)
        try:
            head, files, _, _ = socket.recv_fds(connection, 4, 3)
            body = b""
            while len(body) < int.from_bytes(head, "little"):
                piece = connection.recv(1 << 20)
                if not piece:
                    raise OSError("the request was cut off")
                body += piece
            request = json.loads(body.decode(errors="surrogateescape"))
        except (OSError, ValueError):
            connection.close()  # it was killed while it asked
            return None
        if len(files) < 3 or request["surroundings"] != self._surroundings:
            self._answer(connection, b"n")
            connection.close()
            for file in files:
                os.close(file)
            return None
        self._answer(connection, b"y")
        pid = os.fork()
        if pid == 0:
            return self._become(request, files, connection)
        for file in files:
            os.close(file)
        handle = os.pidfd_open(pid)
        self._children[connection] = (pid, handle)
        self._selector.register(connection, selectors.EVENT_READ, pid)
        self._selector.register(handle, selectors.EVENT_READ, connection)
        return None

    def _answer(self, connection: socket.socket, text: bytes) -> None:
        with suppress(OSError):
            connection.sendall(text)

    def _forward(self, connection: Any) -> None:
        """Signals that the proxy got; if the proxy is gone, so is its process."""
        if connection not in self._children:
            return
        pid, _ = self._children[connection]
        try:
            numbers = connection.recv(64)
        except OSError:
            numbers = b""
        if not numbers:
            self._selector.unregister(connection)
        for number in numbers or (signal.SIGKILL,):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _reap(self, connection: socket.socket) -> None:
        pid, handle = self._children.pop(connection)
        self._selector.unregister(handle)
        os.close(handle)
        with suppress(KeyError):
            self._selector.unregister(connection)
        _, status = os.waitpid(pid, 0)
        self._answer(connection, status.to_bytes(4, "little"))
        connection.close()

    def _end(self) -> None:
        """Nothing that a test has left goes on after the tests."""
        for pid, _ in self._children.values():
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def _become(self, request: dict[str, Any], files: list[int], connection: socket.socket) -> Callable[[], None]:
        """In the forked process: take on the surroundings of the one that asked."""
        self._selector.close()
        self._listener.close()
        for other in (connection, *self._children):
            other.close()
        for _, handle in self._children.values():
            os.close(handle)
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        os.setsid()
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        if "LOCKSTEP_PARENT_PID" in os.environ:
            os.environ["LOCKSTEP_PARENT_PID"] = str(os.getppid())
        time.tzset()
        os.sched_setaffinity(0, request["affinity"])
        for name, pair in request["limits"].items():
            resource.setrlimit(getattr(resource, name), tuple(pair))
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False, buffering=1 if os.isatty(1) else -1)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False, buffering=1)  # noqa: SIM115
        sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
        argv = request["argv"]
        sys.orig_argv, sys.executable = argv, request["executable"]
        return lambda: run_as_main(argv)


def run_as_main(argv: list[str]) -> None:
    """What the interpreter does with `-m module …` or `script …`."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if argv[1] == "-m":
        name = argv[2]
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
        assert spec is not None, name
        sys.path[0], sys.argv = os.getcwd(), [str(spec.origin), *argv[3:]]
        main.__spec__, main.__file__, main.__package__ = spec, str(spec.origin), spec.parent
        code = spec.loader.get_code(spec.name)  # type: ignore[union-attr]
    else:
        path = argv[1]
        sys.path[0], sys.argv = os.path.dirname(os.path.realpath(path)), argv[1:]
        main.__file__ = path
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec")
    exec(code, main.__dict__)


def main() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    zygote = Zygote(sys.argv[1])
    print("ready", flush=True)
    forked = zygote.serve()
    if forked is not None:
        forked()


if __name__ == "__main__":
    main()
