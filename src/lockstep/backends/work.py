"""What a collective of a group in Python gives back: Done, or Pending, which a thread carries out, in order, while the caller goes on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work
from torch.futures import Future

from lockstep.torch_private import untraced


def late(backend: str, timeout_s: float, whom: str) -> RuntimeError:
    """`Timed out waiting` is how the loss of other ranks is recognized (backends/group.py)."""
    return RuntimeError(f"backend={backend}: Timed out waiting {timeout_s:g} s for {whom}")


def timeout_of(given: timedelta | None, otherwise: float) -> float:
    """torch says "no time limit given" by nothing, zero or less than zero."""
    seconds = given.total_seconds() if given is not None else 0.0
    return seconds if seconds > 0 else otherwise


def promise(outcome: Callable[[], Any]) -> tuple[Callable[[], None], Future[Any]]:
    """A future, and what to call when it is settled: then it has the outcome, or the error that it raises.

    `Future.set_exception` would not do: only Python sees its error. To C++, and so to DDP, the exception object is the result,
    and reading tensors out of it ends the process."""
    trigger: Future[None] = Future()
    return (lambda: trigger.set_result(None)), trigger.then(lambda _: outcome())


@untraced
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


@untraced
class Pending(Work):
    """An operation that the progress thread carries out."""

    def __init__(self, perform: Callable[[], None], result: Any, backend: str) -> None:
        super().__init__()
        self._perform: Callable[[], None] | None = perform
        self._result, self._backend = result, backend
        self._settle, self._future = promise(self._outcome)
        self._over = threading.Event()
        self._error: Exception | None = None

    def carry_out(self) -> None:
        assert self._perform is not None
        try:
            self._perform()
        except Exception as error:
            self._error = error
        self._perform = None
        self._settle()
        self._over.set()

    def _outcome(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._result

    def wait(self, timeout: timedelta | None = None) -> bool:
        # Those before it in the queue have their own time limits, so only a limit of the caller's own counts here.
        seconds = timeout_of(timeout, 0.0)
        if not self._over.wait(seconds or None):
            raise late(self._backend, seconds, "a collective that is under way")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._future.done()

    def is_success(self) -> bool:
        return self._future.done() and self._error is None

    def exception(self) -> Any:
        return self._error

    def result(self) -> Any:
        return self._result

    def get_future(self) -> Future[Any]:
        return self._future


class ProgressThread:
    """Carries out pending operations. It starts with the first one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self.queue: deque[Pending] = deque()
        """While it is not empty, no operation may begin elsewhere: ranks match operations by their order."""
        self._ended = False
        self._thread: threading.Thread | None = None

    def add(self, work: Pending) -> Pending:
        with self._changed:
            self.queue.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
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
            with torch.no_grad():  # as in its caller's thread: a collective is no part of a gradient
                work.carry_out()
            self.queue.popleft()
            del work  # with its tensors, before the next wait

    def end(self) -> None:
        """Returns when everything in the queue is over."""
        with suppress(RuntimeError), self._changed:
            self._ended = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
