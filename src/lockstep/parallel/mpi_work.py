"""Operations under way: waiting for the other ranks with a time limit, and working behind the caller's back.

MPI's blocking calls cannot be given up, so a rank that hangs would hang the others for good; its non-blocking calls can,
but take up to six times as long (docs/mpi.md). So every collective first waits at a gate of ours, which has a time limit,
until all ranks have come, and then makes the blocking call, which has nobody left to wait for.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from mpi4py import MPI
from torch._C._distributed_c10d import Work
from torch.futures import Future

SHARED_MEMORY = Path("/dev/shm")
LINE = 64
"""Bytes of a cache line: a counter on each, so that ranks do not disturb each other."""
# How often to look before giving the core to others: about 0.1 ms, so that ranks in step never sleep.
SPINS = 1000
NAP_S = 50e-6


class Gate(Protocol):
    """Where ranks meet before an operation."""

    def wait(self, timeout_s: float, what: str, spins: int = SPINS) -> None: ...
    def close(self) -> None: ...


def late(timeout_s: float, what: str) -> RuntimeError:
    # The first words are those by which the loss of other ranks is known (parallel/group.py).
    return RuntimeError(f"Timed out waiting {timeout_s:g} s for the other ranks in MPI {what}")


def wait_until(there: Callable[[], bool], timeout_s: float, what: str, spins: int = SPINS) -> None:
    """Look, ever less often; raise when it takes too long. Where ranks share cores, the one that is waited for can run."""
    for _ in range(spins):
        if there():
            return
    for _ in range(spins):
        os.sched_yield()
        if there():
            return
    until = time.monotonic() + timeout_s
    while not there():
        time.sleep(NAP_S)
        if time.monotonic() > until:
            raise late(timeout_s, what)


class SharedGate:
    """For ranks of one host: a counter for each in shared memory. It has no name as soon as all have it, so it cannot be
    left behind."""

    def __init__(self, communicator: MPI.Intracomm) -> None:
        size = communicator.size * LINE
        path = ""
        if communicator.rank == 0:
            handle, path = tempfile.mkstemp(prefix="lockstep-mpi-", dir=SHARED_MEMORY)
            os.truncate(handle, size)
            os.close(handle)
        path = communicator.bcast(path)
        with Path(path).open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), size)
        communicator.Barrier()
        if communicator.rank == 0:
            Path(path).unlink()
        self._counters = memoryview(self._memory).cast("q")
        self._mine = communicator.rank * LINE // 8
        self._others = [rank * LINE // 8 for rank in range(communicator.size) if rank != communicator.rank]
        self._turn = 0

    def wait(self, timeout_s: float, what: str, spins: int = SPINS) -> None:
        counters = self._counters
        self._turn = turn = self._turn + 1
        counters[self._mine] = turn
        for other in self._others:
            if counters[other] < turn:
                wait_until(lambda other=other: counters[other] >= turn, timeout_s, what, spins)  # type: ignore[misc]

    def close(self) -> None:
        self._counters.release()
        self._memory.close()


class BarrierGate:
    """For ranks of several hosts: MPI's own non-blocking barrier, on a communicator of its own."""

    def __init__(self, communicator: MPI.Intracomm) -> None:
        self._comm = communicator.Dup()

    def wait(self, timeout_s: float, what: str, spins: int = SPINS) -> None:
        wait_until(self._comm.Ibarrier().Test, timeout_s, what, spins)

    def close(self) -> None:
        self._comm.Free()


def gate_for(communicator: MPI.Intracomm) -> Gate:
    here = communicator.Split_type(MPI.COMM_TYPE_SHARED)
    one_host = here.size == communicator.size
    here.Free()
    # All ranks must choose alike.
    possible = communicator.allreduce(one_host and SHARED_MEMORY.is_dir(), MPI.LAND)
    return SharedGate(communicator) if possible else BarrierGate(communicator)


def timeout_of(given: timedelta | None, otherwise: float) -> float:
    """torch says "no time limit given" by nothing, zero or less than zero."""
    seconds = given.total_seconds() if given is not None else 0.0
    return seconds if seconds > 0 else otherwise


class Queued(Work):
    """An operation that the progress thread carries out."""

    def __init__(self, perform: Callable[[], None], result: Any, what: str) -> None:
        super().__init__()
        self._perform, self._result, self._what = perform, result, what
        self._future: Future[Any] = Future()
        self._over = threading.Event()
        self._error: Exception | None = None

    def carry_out(self) -> None:
        try:
            self._perform()
        except Exception as error:
            self._error = error
            self._future.set_exception(error)
        else:
            self._future.set_result(self._result)
        self._over.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        # Those before it in the queue have their own time limits, so only a limit of the caller's own counts here.
        seconds = timeout_of(timeout, 0.0)
        if not self._over.wait(seconds or None):
            raise late(seconds, self._what)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._over.is_set()

    def is_success(self) -> bool:
        return self._over.is_set() and self._error is None

    def exception(self) -> Any:
        return self._error

    def result(self) -> Any:
        return self._result

    def get_future(self) -> Future[Any]:
        return self._future


class Message(Work):
    """A message on its way from or to one other rank. It is looked after while somebody waits for it."""

    def __init__(self, request: MPI.Request, result: Any, timeout_s: float, what: str, finish: Any, keep: Any) -> None:
        super().__init__()
        self._request, self._result, self._timeout_s, self._what = request, result, timeout_s, what
        # A buffer is an address to MPI: the tensor behind it must live as long as the message.
        self._finish, self._keep = finish, keep
        self._lock, self._over, self._source = threading.Lock(), False, -1

    def is_completed(self) -> bool:
        with self._lock:
            status = MPI.Status()
            if not self._over and self._request.Test(status):
                self._over, self._source = True, status.source
                if self._finish is not None:
                    self._finish()
            return self._over

    def is_success(self) -> bool:
        return self.is_completed()

    def wait(self, timeout: timedelta | None = None) -> bool:
        wait_until(self.is_completed, timeout_of(timeout, self._timeout_s), self._what)
        return True

    def result(self) -> Any:
        return self._result

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future()

        def follow() -> None:
            try:
                self.wait()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(self._result)

        threading.Thread(target=follow, name="lockstep-mpi-message", daemon=True).start()
        return future


class Progress:
    """A thread that carries out large operations, in order, while the caller computes. It starts with the first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.queue: deque[Queued] = deque()
        self._ended = False
        self._thread: threading.Thread | None = None

    def add(self, work: Queued) -> Queued:
        with self._changed:
            self.queue.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="lockstep-mpi", daemon=True)
                self._thread.start()
            self._changed.notify()
        return work

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self.queue and not self._ended:
                    self._changed.wait()
                if not self.queue:
                    return
                work = self.queue[0]
            work.carry_out()
            # Only now: while it is in the queue, no other operation may begin.
            self.queue.popleft()

    def end(self) -> None:
        """Returns when everything in the queue is over."""
        with suppress(RuntimeError), self._changed:
            self._ended = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
