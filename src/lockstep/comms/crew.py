"""The processes of one backend: started by the launcher that it needs, given orders, and ended whatever happens."""

from __future__ import annotations

import dataclasses
import json
import os
import select
import signal
import subprocess
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec

from lockstep.comms import segments
from lockstep.comms.plan import Task, missing, placement_for
from lockstep.comms.worker import rank_folder
from lockstep.errors import InputError, LockstepError
from lockstep.launch import mpirun, starts_of
from lockstep.launch.base import Start
from lockstep.launch.cores import cores_of
from lockstep.placement import Plan
from lockstep.process import PARENT
from lockstep.recipe import Recipe
from lockstep.run import Spec, write_atomic

START_S = 90.0
LEAVE_S = 5.0
# When one rank has failed, the others notice in a moment or hang; their accounts are waited for so long.
GRACE_S = 2.0
OUR_WORKER = "lockstep.comms.worker"


class CrewLost(Exception):
    """An order was not carried out, and the ranks cannot go on: `kind` is unsupported, failed or hang."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind, self.reason = kind, reason


class Crew:
    """The ranks of one backend, waiting for orders. They sleep while another backend is measured."""

    def __init__(self, task: Task, folder: Path) -> None:
        self.task, self.folder = task, folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._orders: list[int] = []
        self._answers: list[int] = []
        self._pending: list[bytes] = []
        self._leavings: set[tuple[str, int]] = set()
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
        try:
            starts = starts_of(_spec(self.task), self.folder, 0)
        except LockstepError as error:
            raise CrewLost("failed", str(error)) from None
        # Crews take turns, so those of one measurement share their cores.
        cores = self._cores.enter_context(cores_of(self.task.placement))
        for start in starts:
            self._processes.append(self._begin(start, cores))
        self._collect(START_S)

    def _begin(self, start: Start, cores: dict[str, str]) -> subprocess.Popen[bytes]:
        start = for_comms(start)
        environment = {**start.defaults, **os.environ, **start.environment, **cores, PARENT: str(os.getpid())}
        with (self.folder / "launcher.log").open("ab") as log:
            return subprocess.Popen(
                start.argv, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

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
                        self._leavings.update((name, inode) for name, inode in answer["segments"])
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
            raise CrewLost("unsupported" if first["unsupported"] else "failed", f"rank {rank}: {first['error']}")
        silent = sorted(set(range(len(self._answers))) - set(answers))
        if not silent:
            return
        codes = [p.returncode for p in self._processes if p.poll() is not None]
        if codes:
            raise CrewLost("failed", f"the ranks ended (exit code {codes[0]}): {self._last_words()}")
        names = ", ".join(map(str, silent))
        raise CrewLost("hang", f"no answer from rank {names} within {limit_s:g} s")

    def _last_words(self) -> str:
        """The last line of any log, for a launcher that did not get as far as starting ranks."""
        logs = [self.folder / "launcher.log", *sorted(self.folder.glob("ranks/*/log.txt"))]
        for log in logs:
            with suppress(OSError):
                lines = log.read_text(errors="replace").strip().splitlines()
                if lines:
                    return lines[-1][:200]
        return "nothing in the logs"

    def end(self, politely: bool) -> None:
        """Let the ranks part in order if they can; in any case none is left afterwards."""
        if politely:
            with suppress(CrewLost, OSError, subprocess.TimeoutExpired):
                self._tell({"do": "leave"})
                self._collect(LEAVE_S)
                until = time.monotonic() + LEAVE_S
                for process in self._processes:
                    process.wait(max(0.1, until - time.monotonic()))
        for path in self.folder.glob("ranks/*/pid"):
            with suppress(OSError, ValueError):
                self._leavings.update(segments.of_rank(int(path.read_text()), self.folder))
        # Closing the pipes ends every rank, also those that are no children of ours.
        for end in (*self._orders, *self._answers):
            os.close(end)
        self._orders, self._answers, self._pending = [], [], []
        for sign in (signal.SIGTERM, signal.SIGKILL):
            for process in self._processes:
                if process.poll() is None:
                    with suppress(ProcessLookupError, PermissionError):
                        os.killpg(process.pid, sign)
            for process in self._processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(2.0)
        self._processes = []
        self._cores.close()
        for name, inode in self._leavings:
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
    """The same start with our worker in the place of the training worker, or of the one that sits beside it."""
    words = [OUR_WORKER if word in ("lockstep.worker", "lockstep.launch.sitter") else word for word in start.argv]
    assert OUR_WORKER in words or start.rank is None, start.argv
    return dataclasses.replace(start, argv=words)


def _spec(task: Task) -> Spec:
    """Launchers read placement and ranks from a run's spec; there is no run here, so the rest is empty."""
    ranks = task.placement.ranks
    plan = Plan(
        ranks=ranks,
        global_batch=ranks,
        micro_batch=1,
        accumulation=1,
        train_samples=0,
        test_samples=0,
        steps_per_epoch=0,
        last_batch=0,
        total_steps=0,
    )
    return Spec(id="comms", created=time.time(), lockstep="", recipe=Recipe(), placement=task.placement, plan=plan)
