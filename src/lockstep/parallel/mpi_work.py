"""Operations under way: waiting for them with a time limit, and finishing them behind the caller's back.

MPI's blocking calls cannot be given up, so a rank that hangs would hang all the others for good. Everything here is
therefore started by a non-blocking call and then polled. Calls are started in the caller's thread, so that their order,
which MPI matches them by, is the program's.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from mpi4py import MPI
from torch._C._distributed_c10d import Work
from torch.futures import Future

# Polls before a waiting rank offers its core to others: about as long as two ranks in step need for a small exchange.
# Where ranks share cores, the one that is waited for can then run.
SPINS = 200


def poll_until_done(operation: Operation, timeout_s: float) -> None:
    """Returns when it is done; raises when that takes too long."""
    for _ in range(SPINS):
        if operation.poll():
            return
    until = time.monotonic() + timeout_s
    while not operation.poll():
        os.sched_yield()
        if time.monotonic() > until:
            # The words are those by which the loss of other ranks is known (parallel/group.py).
            raise RuntimeError(f"Timed out waiting {timeout_s:g} s for the other ranks in MPI {operation.name}")


class Operation:
    """Requests under way, what to do when all are done, and everything that must stay alive until then."""

    __slots__ = ("_finish", "_keep", "_requests", "name", "result", "source")

    def __init__(
        self,
        name: str,
        requests: list[MPI.Request],
        result: Any,
        finish: Callable[[], None] | None = None,
        keep: Any = None,
    ) -> None:
        self.name, self.result, self.source = name, result, -1
        # A buffer is an address to MPI: the tensors behind it live as long as this object.
        self._requests, self._finish, self._keep = requests, finish, keep

    def poll(self) -> bool:
        """Whether it is done; gets it a little further if not. Only one thread may ask."""
        while self._requests:
            status = MPI.Status()
            if not self._requests[-1].Test(status):
                return False
            self.source = status.source
            self._requests.pop()
        if self._finish is not None:
            self._finish()
            self._finish = None
        return True


class Done(Work):
    """An operation that was over before its call returned."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def result(self) -> Any:
        return self._result

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(self._result)
        return future


class Under(Work):
    """An operation under way that its owner waits for, or that the progress thread finishes."""

    def __init__(self, operation: Operation, timeout_s: float, progress: Progress) -> None:
        super().__init__()
        self._operation, self._timeout_s, self._progress = operation, timeout_s, progress
        self._done = False
        self._followed: Followed | None = None

    def follow(self) -> Under:
        """Leave it to the progress thread."""
        if self._followed is None:
            self._followed = Followed(self._operation, self._timeout_s)
            self._progress.add(self._followed)
        return self

    def wait(self, timeout: timedelta | None = None) -> bool:
        seconds = timeout.total_seconds() if timeout else self._timeout_s
        if self._followed is not None:
            self._followed.wait(seconds)
        elif not self._done:
            poll_until_done(self._operation, seconds)
            self._done = True
        return True

    def is_completed(self) -> bool:
        if self._followed is not None:
            return self._followed.over.is_set()
        self._done = self._done or self._operation.poll()
        return self._done

    def is_success(self) -> bool:
        return self.is_completed() and (self._followed is None or self._followed.error is None)

    def exception(self) -> Any:
        return self._followed.error if self._followed is not None else None

    def result(self) -> Any:
        return self._operation.result

    def source_rank(self) -> int:
        return self._operation.source

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        if self._done:
            return Done(self._operation.result).get_future()
        self.follow()
        assert self._followed is not None
        return self._followed.future


class Followed:
    """What the progress thread and the waiting thread share about one operation."""

    def __init__(self, operation: Operation, timeout_s: float) -> None:
        self.operation = operation
        self.until = time.monotonic() + timeout_s
        self.timeout_s = timeout_s
        self.future: Future[Any] = Future()
        self.over = threading.Event()
        self.error: BaseException | None = None

    def wait(self, seconds: float) -> None:
        if not self.over.wait(seconds):
            raise RuntimeError(f"Timed out waiting {seconds:g} s for the other ranks in MPI {self.operation.name}")
        if self.error is not None:
            raise self.error

    def advance(self) -> bool:
        """Poll once; completes the future when there is a result or no more hope."""
        try:
            if not self.operation.poll():
                if time.monotonic() < self.until:
                    return False
                what = f"Timed out waiting {self.timeout_s:g} s for the other ranks in MPI {self.operation.name}"
                self.error = RuntimeError(what)
        except Exception as error:
            self.error = error
        if self.error is None:
            self.future.set_result(self.operation.result)
        else:
            self.future.set_exception(self.error)
        self.over.set()
        return True


class Progress:
    """A thread that keeps large operations moving while the caller computes. It starts with the first of them."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._under_way: list[Followed] = []
        self._ended = False
        self._thread: threading.Thread | None = None

    def add(self, followed: Followed) -> None:
        with self._lock:
            self._under_way.append(followed)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="lockstep-mpi", daemon=True)
                self._thread.start()
            self._lock.notify()

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._under_way and not self._ended:
                    self._lock.wait()
                if not self._under_way:
                    return
                now = list(self._under_way)
            over = [followed for followed in now if followed.advance()]
            if over:
                with self._lock:
                    self._under_way = [followed for followed in self._under_way if followed not in over]
            else:
                # The computing thread of this rank may share the core.
                os.sched_yield()

    def end(self) -> None:
        """Returns when everything under way is over."""
        with self._lock:
            self._ended = True
            self._lock.notify()
        if self._thread is not None:
            self._thread.join()
