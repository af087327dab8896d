"""Waiting for the other ranks, with a time limit.

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
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI
from torch.distributed import Work
from torch.futures import Future

from lockstep.backends.work import late, promise, timeout_of
from lockstep.torch_private import untraced

SHARED_MEMORY = Path("/dev/shm")
LINE = 64
"""Bytes of a cache line: a counter on each, so that ranks do not disturb each other."""
# How often to look before offering the core to others, and how long it is offered before sleeping: ranks in step never sleep.
SPINS = 1000
YIELD_S = 0.002
NAP_S = 50e-6


class Gate(Protocol):
    """Where ranks meet before an operation. All must mean the same one, which `tag` stands for: a number of 31 bits."""

    def enter(self, tag: int) -> None:
        """Say that this rank has come. It does not wait."""

    def look(self) -> bool:
        """Whether all have come; raises Mismatch if somebody came for another operation."""
        ...

    def close(self) -> None: ...


class Mismatch(RuntimeError):
    """Ranks called different operations."""

    def __init__(self, whom: str) -> None:
        super().__init__(
            f"{whom} called another collective, or the same one with another operation, type, size or root"
        )


def briefly(there: Callable[[], bool]) -> bool:
    """Look for 2 ms, after the first moments offering the core: where ranks share cores, the one that is waited for can run."""
    for _ in range(SPINS):
        if there():
            return True
    until = time.monotonic() + YIELD_S
    while not there():
        if time.monotonic() > until:
            return False
        os.sched_yield()
    return True


def sleep_until(there: Callable[[], bool], timeout_s: float, what: str) -> None:
    until = time.monotonic() + timeout_s
    while not there():
        time.sleep(NAP_S)
        if time.monotonic() > until:
            raise late("mpi", timeout_s, f"the other ranks in {what}")


class SharedGate:
    """For ranks of one host: two words for each in shared memory, by the parity of the turn. A word is the tag and the number of
    the turn, so one comparison tells that a rank has come, and for the same. A rank comes for turn t + 2 only when all have
    come for t + 1, and so have seen t: two words are enough, and since a word is written as one, no fence is needed.

    The memory has no name as soon as all have it, so it cannot be left behind."""

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
        self._words = memoryview(self._memory).cast("q")
        self._mine = communicator.rank * LINE // 8
        self._others = [rank * LINE // 8 for rank in range(communicator.size) if rank != communicator.rank]
        self._turn = self._word = 0

    def enter(self, tag: int) -> None:
        self._turn = turn = (self._turn + 1) & 0xFFFFFFFF
        self._word = tag << 32 | turn
        self._words[self._mine + (turn & 1)] = self._word

    def look(self) -> bool:
        words, word, parity = self._words, self._word, self._turn & 1
        for other in self._others:
            theirs = words[other + parity]
            if theirs != word:
                if (theirs ^ word) & 0xFFFFFFFF:
                    return False
                raise Mismatch(f"rank {other * 8 // LINE}")
        return True

    def close(self) -> None:
        self._words.release()
        self._memory.close()


class ReducingGate:
    """For ranks of several hosts: MPI's own non-blocking reduction, of the tag and its negative, on a communicator of its own.
    It takes no longer than a barrier; where the largest tag is not the smallest, not all are the same."""

    def __init__(self, communicator: MPI.Intracomm) -> None:
        self._comm = communicator.Dup()
        self._given, self._found = np.zeros(2, np.int64), np.zeros(2, np.int64)
        self._request = MPI.REQUEST_NULL

    def enter(self, tag: int) -> None:
        self._given[:] = tag, -tag
        self._request = self._comm.Iallreduce(self._given, self._found, MPI.MAX)

    def look(self) -> bool:
        if not self._request.Test():
            return False
        if self._found[0] != -self._found[1]:
            raise Mismatch("another rank")
        return True

    def close(self) -> None:
        self._comm.Free()


def gate_for(communicator: MPI.Intracomm) -> Gate:
    here = communicator.Split_type(MPI.COMM_TYPE_SHARED)
    one_host = here.size == communicator.size
    here.Free()
    # All ranks must choose alike.
    possible = communicator.allreduce(one_host and SHARED_MEMORY.is_dir(), MPI.LAND)
    return SharedGate(communicator) if possible else ReducingGate(communicator)


@untraced
class Message(Work):
    """A message on its way from or to one other rank. It is looked after while somebody waits for it."""

    def __init__(self, request: MPI.Request, result: Any, timeout_s: float, what: str, finish: Any, keep: Any) -> None:
        super().__init__()
        self._request, self._result, self._timeout_s, self._what = request, result, timeout_s, what
        # A buffer is an address to MPI: the tensor behind it must live as long as the message.
        self._finish, self._keep = finish, keep
        self._lock, self._over, self._source = threading.Lock(), False, -1
        self._error: Exception | None = None

    def is_completed(self) -> bool:
        with self._lock:
            if not self._over:
                self._look()
            if self._error is not None:
                raise self._error
            return self._over

    def _look(self) -> None:
        status = MPI.Status()
        try:
            if self._request.Test(status):
                self._over, self._source = True, status.source
                if self._finish is not None:
                    self._finish(status)
        except RuntimeError as error:  # mpi4py's are, too
            self._over, self._error = True, error

    def is_success(self) -> bool:
        return self.is_completed()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not briefly(self.is_completed):
            sleep_until(self.is_completed, timeout_of(timeout, self._timeout_s), self._what)
        return True

    def result(self) -> Any:
        return self._result

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        settle, future = promise(self._outcome)

        def follow() -> None:
            with suppress(RuntimeError):  # told by the outcome
                self.wait()
            settle()

        threading.Thread(target=follow, name="lockstep-mpi-message", daemon=True).start()
        return future

    def _outcome(self) -> Any:
        if not self.is_completed():
            raise late("mpi", self._timeout_s, f"the other rank in {self._what}")
        return self._result
