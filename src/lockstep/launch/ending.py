"""How a run ends before its time: its processes are ended too, why is written down where that is possible, and is raised as one line."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lockstep.errors import InputError, RunCancelled, RunFailed
from lockstep.launch.processes import CannotStart
from lockstep.launch.stall import Stalled
from lockstep.run import FolderError, Run, folder_error


class FolderWatch:
    """The run folder as it was at the start. One that is removed, or replaced, in mid-run is not written to any more."""

    def __init__(self, run: Run) -> None:
        self._folder = run.folder
        self._was = self._identity()

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = self._folder.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_dev, found.st_ino

    def problem(self) -> FolderError | None:
        try:
            same = self._was is not None and self._identity() == self._was
        except OSError:  # a file server that does not answer for a moment
            return None
        return None if same else FolderError(f"the run folder {self._folder} was removed while the run was under way")


class HungUp(BaseException):
    """The terminal was closed."""


@contextmanager
def signals_as_interrupt(hung_up: type[BaseException] = KeyboardInterrupt) -> Iterator[list[int]]:
    """SIGTERM and SIGHUP stop a run as Ctrl-C does: in order, keeping what was measured. The list is of those that came.

    `hung_up`: what a closed terminal raises instead. It is heard once: the kernel says it, and the shell, and the second must not
    disturb what the first one has begun.
    """
    received: list[int] = []

    def interrupt(number: int, frame: Any) -> None:
        received.append(number)
        if number == signal.SIGHUP:
            signal.signal(number, signal.SIG_IGN)
        raise hung_up if number == signal.SIGHUP else KeyboardInterrupt

    try:
        # What is ignored stays so: nohup is how people say that a closed terminal does not matter.
        heard = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is not signal.SIG_IGN]
        before = {number: signal.signal(number, interrupt) for number in heard}
    except ValueError:  # not in the main thread (a notebook, a test runner): leave them as they are
        yield received
        return
    try:
        yield received
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is interrupt:
                signal.signal(number, handler)


@contextmanager
def recorded_end(
    run: Run, watch: FolderWatch, end: Callable[[], dict[str, Any]], first_host: bool = True
) -> Iterator[None]:
    """Around the time in which a run is under way. `end` ends what was started, and returns what the status is to say beside the cause."""

    def ended(state: str, cause: str, **more: Any) -> None:
        more |= end()
        if first_host and watch.problem() is None:
            run.write_final_status(state, cause=cause, **more)

    try:
        yield
    except KeyboardInterrupt:
        ended("cancelled", "stopped by the user")
        raise RunCancelled(f"stopped; what was measured is in {run.folder}") from None
    except Stalled as stalled:
        ended("stalled", stalled.cause, **stalled.named)
        raise RunFailed(f"run stalled: {stalled.cause}; what was measured is in {run.folder}") from None
    except CannotStart as error:
        ended("failed", str(error))
        raise RunFailed(f"run failed: {error}") from None
    except (InputError, OSError) as error:
        problem = error if isinstance(error, InputError) else folder_error(run.folder, error)
        ended("failed", str(problem))
        _fail_if_gone(watch)
        raise problem from None
    _fail_if_gone(watch)


def _fail_if_gone(watch: FolderWatch) -> None:
    gone = watch.problem()
    if gone is not None:
        raise RunFailed(f"run failed: {gone}") from None
