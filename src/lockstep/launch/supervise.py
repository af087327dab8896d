"""Watching a run: start the processes, follow them, and end them all when one fails."""

from __future__ import annotations

import os
import platform
import select
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from lockstep.launch.base import Start, Watched
from lockstep.launch.cause import failure, first_cause
from lockstep.launch.cores import cores_of
from lockstep.launch.ending import FolderWatch, recorded_end, signals_as_interrupt
from lockstep.launch.hang import HangWatch
from lockstep.launch.processes import begin, end_all
from lockstep.launch.stall import StallWatch
from lockstep.process import CORES
from lockstep.run import Run, Spec

Progress = Callable[[Run, Spec], None]

POLL_S = 0.05
PROGRESS_S = 0.2
# Where nobody looks on, there is no hurry: placements that take turns are watched by as many threads, beside the one whose turn it is.
UNSEEN_S = 1.0
# After the first failure the other ranks notice within a moment and write their failure reports; then they are ended.
GRACE_S = 3.0


def supervise(
    run: Run,
    spec: Spec,
    starts: list[Start],
    host_index: int,
    progress: Progress | None,
    stop: threading.Event | None = None,
) -> None:
    """Returns when the run is done; raises what ended it otherwise. No process is left behind either way.

    `stop`: for another thread to stop it as Ctrl-C would.
    """
    watched: list[Watched] = []
    first_host = host_index == 0
    watch = FolderWatch(run)

    def end() -> dict[str, Any]:
        end_all((w.process for w in watched), max((w.start.ends_within_s for w in watched), default=0.0))
        return {}

    with signals_as_interrupt(), cores_of(spec.placement) as cores:
        with recorded_end(run, watch, end, first_host):
            try:
                if first_host:
                    pinned = {"cores": cores[CORES]} if CORES in cores else {}
                    run.write_status("starting", supervisor_pid=os.getpid(), host=platform.node(), **pinned)
                for start in starts:
                    watched.append(Watched(begin(start, cores, run.folder / "launcher.log"), start))
                _follow(run, spec, watched, watch, Reporter(run, spec, progress), stop)
            finally:
                end()
        # A rank that stumbles on its way out, after rank 0 has written the results, does not undo them.
        finished = first_host and run.recorded_status()["state"] == "done"
        if any(w.process.returncode for w in watched) and not finished:
            cause = first_cause(run, watched)
            if first_host:
                run.write_final_status("failed", **cause)
            raise failure(run, cause)


class Reporter:
    """Shows how a run goes. Whoever looked on may go away (`lockstep run … | head`), and the run goes on."""

    def __init__(self, run: Run, spec: Spec, progress: Progress | None) -> None:
        self._run, self._spec, self._progress = run, spec, progress

    @property
    def pause_s(self) -> float:
        return UNSEEN_S if self._progress is None else PROGRESS_S

    def __call__(self) -> None:
        if self._progress is None:
            return
        try:
            self._progress(self._run, self._spec)
        except OSError:  # a closed pipe, a terminal that hung up, a log on a full disk
            self._progress = None


def _follow(
    run: Run, spec: Spec, watched: list[Watched], watch: FolderWatch, report: Reporter, stop: threading.Event | None
) -> None:
    next_look, failed_at = 0.0, None
    stall, hang = StallWatch(spec), HangWatch(run, spec)
    with Exits(watched) as exits:
        while True:
            now = time.monotonic()
            for w in watched:
                if w.ended is None and w.process.poll() is not None:
                    w.ended = time.time()
                    if w.process.returncode and failed_at is None:
                        failed_at = now
            if all(w.ended is not None for w in watched):
                break
            if failed_at is not None and now - failed_at > GRACE_S:
                return
            if now >= next_look:
                next_look = now + report.pause_s
                if stop is not None and stop.is_set():
                    raise KeyboardInterrupt
                if (problem := watch.problem()) is not None:
                    raise problem
                report()
                # mpirun waits for the others of a program that does not use MPI. torchrun may start all of them again.
                if failed_at is None and not spec.placement.max_restarts and run.failures():
                    failed_at = now
                if failed_at is None:
                    beats = run.rank_statuses()
                    stall.check(now, beats)
                    hang.check(now, beats)
            exits.wait(next_look - now)
    report()


class Exits:
    """Waits for the end of any process, without asking again and again where the system can tell (Linux 5.3 and later)."""

    def __init__(self, watched: list[Watched]) -> None:
        self._handles: list[int] = []
        self._poll: select.poll | None = None
        with suppress(AttributeError, OSError):
            for w in watched:
                self._handles.append(os.pidfd_open(w.process.pid))
            self._poll = select.poll()
            for handle in self._handles:
                self._poll.register(handle, select.POLLIN)

    def __enter__(self) -> Exits:
        return self

    def wait(self, seconds: float) -> None:
        """Until one more has ended, but no longer than that."""
        if self._poll is None:
            time.sleep(min(seconds, POLL_S))
            return
        for handle, _ in self._poll.poll(1000 * seconds):
            self._poll.unregister(handle)

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            os.close(handle)
