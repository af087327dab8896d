"""A process pool: the ranks of one backend, started by the launcher that it needs, given orders, and ended whatever happens."""

from __future__ import annotations

import dataclasses
import json
import os
import select
import subprocess
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec

from lockstep.backends.costs.plan import Task, missing, placement_for
from lockstep.backends.mpi import segments
from lockstep.comms.worker import rank_folder
from lockstep.errors import InputError, LockstepError
from lockstep.launch import mpirun, starts_of
from lockstep.launch.base import Start
from lockstep.launch.cores import cores_of
from lockstep.launch.processes import CannotStart, begin, end_all
from lockstep.plan import plan
from lockstep.recipe import Recipe
from lockstep.run import Spec, write_atomic
from lockstep.text import last_line

START_S = 90.0
LEAVE_S = 5.0
# When one rank has failed, the others notice in a moment or hang; this is how long their accounts are waited for.
GRACE_S = 2.0
OUR_WORKER = "lockstep.comms.worker"


class BrokenPool(Exception):
    """An order was not carried out, and the ranks cannot go on: `kind` is unsupported, failed or hang."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind, self.reason = kind, reason


class ProcessPool:
    """The ranks of one backend, waiting for orders. They sleep while another backend is measured."""

    def __init__(self, task: Task, folder: Path) -> None:
        self.task, self.folder = task, folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._orders: list[int] = []
        self._answers: list[int] = []
        self._pending: list[bytes] = []
        self._segments: set[tuple[str, int]] = set()
        self._cores = ExitStack()

    def start(self) -> None:
        ranks = self.task.placement.ranks
        for rank in range(ranks):
            mine = rank_folder(self.folder, rank)
            mine.mkdir(parents=True)
            for name, ends in (("orders", self._orders), ("answers", self._answers)):
                os.mkfifo(mine / name, 0o600)
                # Opened both ways, so that opening waits for nobody; only our own end counts for the rank's reader.
                ends.append(os.open(mine / name, os.O_RDWR | os.O_NONBLOCK))
            self._pending.append(b"")
        write_atomic(self.folder / "task.json", msgspec.to_builtins(self.task))
        # Pools take turns, so those of one measurement share their cores.
        cores = self._cores.enter_context(cores_of(self.task.placement))
        try:
            for start in starts_of(_spec(self.task), self.folder, 0):
                self._processes.append(begin(for_comms(start), cores, self.folder / "launcher.log"))
        except (LockstepError, CannotStart) as error:
            raise BrokenPool("failed", str(error)) from None
        self._collect(START_S)

    def measure(self, collective: str, size: int, calls: int, seed: int, limit_s: float) -> list[dict[str, Any]]:
        """Every rank's answer, in the order of ranks."""
        order = {"do": "measure", "collective": collective, "size": size, "calls": calls, "seed": seed}
        self._tell(order)
        return self._collect(limit_s)

    def _tell(self, order: dict[str, Any]) -> None:
        for end in self._orders:
            os.write(end, json.dumps(order).encode() + b"\n")

    def _collect(self, limit_s: float) -> list[dict[str, Any]]:
        """One answer of every rank, or the reason why there is none."""
        answers: dict[int, dict[str, Any]] = {}
        until = time.monotonic() + limit_s
        while len(answers) < len(self._answers):
            ended = next((p for p in self._processes if p.poll() is not None), None)
            readable, _, _ = select.select(self._answers, [], [], 0.2)
            for end in readable:
                rank = self._answers.index(end)
                if answer := self._read(rank):
                    answers[rank] = answer
                    if "error" in answer:
                        self._segments.update((name, inode) for name, inode in answer["segments"])
                        until = min(until, time.monotonic() + GRACE_S)
            if ended is not None and not readable:
                break
            if time.monotonic() > until and not readable:
                break
        self._judge(answers, limit_s)
        return [answers[rank] for rank in sorted(answers)]

    def _read(self, rank: int) -> dict[str, Any] | None:
        self._pending[rank] += os.read(self._answers[rank], 1 << 16)
        line, newline, rest = self._pending[rank].partition(b"\n")
        if not newline:
            return None
        self._pending[rank] = rest
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _judge(self, answers: dict[int, dict[str, Any]], limit_s: float) -> None:
        for answer in answers.values():
            if "input_error" in answer:
                raise InputError(answer["input_error"])
        errors = {rank: answer for rank, answer in sorted(answers.items()) if "error" in answer}
        if errors:
            # A rank that only lost the others is not the cause, if another one has an account of its own.
            rank, first = min(errors.items(), key=lambda item: bool(item[1]["lost"]))
            raise BrokenPool("unsupported" if first["unsupported"] else "failed", f"rank {rank}: {first['error']}")
        silent = sorted(set(range(len(self._answers))) - set(answers))
        if not silent:
            return
        codes = [p.returncode for p in self._processes if p.poll() is not None]
        if codes:
            raise BrokenPool("failed", f"the ranks ended (exit code {codes[0]}): {self._last_words()}")
        names = ", ".join(map(str, silent))
        raise BrokenPool("hang", f"no answer from rank {names} within {limit_s:g} s")

    def _last_words(self) -> str:
        """The last line of any log, for a launcher that did not get as far as starting ranks."""
        logs = [self.folder / "launcher.log", *sorted(self.folder.glob("ranks/*/log.txt"))]
        texts = (log.read_text(errors="replace") for log in logs if log.is_file())
        return next((line[:200] for text in texts if (line := last_line(text))), "nothing in the logs")

    def end(self, politely: bool) -> None:
        """Let the ranks part in order if they can; in any case none is left afterwards."""
        if politely:
            with suppress(BrokenPool, OSError, subprocess.TimeoutExpired):
                self._tell({"do": "leave"})
                self._collect(LEAVE_S)
                until = time.monotonic() + LEAVE_S
                for process in self._processes:
                    process.wait(max(0.1, until - time.monotonic()))
        for path in self.folder.glob("ranks/*/pid"):
            with suppress(OSError, ValueError):
                self._segments.update(segments.of_rank(int(path.read_text()), self.folder))
        # Closing the pipes ends every rank, also those that are no children of ours.
        for end in (*self._orders, *self._answers):
            os.close(end)
        self._orders, self._answers, self._pending = [], [], []
        end_all(self._processes)
        self._processes = []
        self._cores.close()
        for name, inode in self._segments:
            segments.remove(name, inode)


def unavailable(backend: str, device: str, ranks: int) -> str | None:
    """Why a backend cannot be tried on this machine: what `missing` sees, or no launcher for its ranks."""
    reason = missing(backend, device)
    if reason is None and backend == "mpi":
        try:
            mpirun.choose(placement_for(backend, device, ranks, START_S))
        except InputError as error:
            return str(error)
    return reason


def for_comms(start: Start) -> Start:
    """The same start with our worker in the place of the training worker, or of the monitor beside it."""
    words = [OUR_WORKER if word in ("lockstep.worker", "lockstep.launch.monitor") else word for word in start.argv]
    assert OUR_WORKER in words or start.rank is None, start.argv
    return dataclasses.replace(start, argv=words)


def _spec(task: Task) -> Spec:
    """Launchers read placement and ranks from a run's spec; there is no run here, so the rest is empty."""
    recipe = Recipe(global_batch=task.placement.ranks)
    planned = plan(recipe, task.placement, 1, 1)
    return Spec(id="comms", created=time.time(), lockstep="", recipe=recipe, placement=task.placement, plan=planned)


def wrong_result(answers: list[dict[str, Any]]) -> str | None:
    """The first rank's result that is wrong; None where all are right."""
    wrong = (f"rank {rank}: {answer['wrong']}" for rank, answer in enumerate(answers) if answer["wrong"])
    return next(wrong, None) or left_early(answers)


def left_early(answers: list[dict[str, Any]]) -> str | None:
    """Whether a rank left a barrier before another one had come to it."""
    moments = [answer["moments"] for answer in answers]
    if any(pair is None for pair in moments):
        return None
    came, went = [pair[0] for pair in moments], [pair[1] for pair in moments]
    if max(came) <= min(went):
        return None
    early, late = went.index(min(went)), came.index(max(came))
    return f"rank {early} left the barrier {(max(came) - min(went)) / 1e6:.1f} ms before rank {late} came to it"
