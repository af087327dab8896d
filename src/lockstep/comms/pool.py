"""The ranks of one backend: a pool (launch/pool.py) whose orders are collectives to measure."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from lockstep.backends.costs.plan import Task, missing, placement_for
from lockstep.backends.mpi import segments
from lockstep.errors import InputError, LockstepError
from lockstep.launch import mpirun
from lockstep.launch.pool import Pool
from lockstep.launch.processes import CannotStart
from lockstep.placement import Placement, ranks_per_host
from lockstep.run import write_atomic

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

    def __init__(self, task: Task, folder: Path, tell: Callable[[str], None] = lambda text: None) -> None:
        self.task, self.folder, self._say = task, folder, tell
        self._pool = Pool(task.placement, folder, OUR_WORKER)
        self._segments: set[tuple[str, int]] = set()

    def start(self) -> None:
        placement = self.task.placement
        self.folder.mkdir(parents=True)
        write_atomic(self.folder / "task.json", msgspec.to_builtins(self.task))
        try:
            self._pool.start()
        except (LockstepError, CannotStart) as error:
            if isinstance(error, InputError) and (placement.emulated or placement.launcher == "slurm"):
                raise
            raise BrokenPool("failed", str(error)) from None
        self._pool.join(START_S, self._say)
        self._collect(START_S)

    def measure(self, collective: str, size: int, calls: int, seed: int, limit_s: float) -> list[dict[str, Any]]:
        """Every rank's answer, in the order of ranks."""
        order = {"do": "measure", "collective": collective, "size": size, "calls": calls, "seed": seed}
        self._pool.tell(order)
        return self._collect(limit_s)

    def _collect(self, limit_s: float) -> list[dict[str, Any]]:
        """One answer of every rank, or the reason why there is none."""
        answers = self._pool.collect(limit_s, grace=lambda answer: GRACE_S if "error" in answer else None)
        for answer in answers.values():
            self._segments.update((name, inode) for name, inode in answer.get("segments", ()))
        self._judge(answers, limit_s)
        return [answers[rank] for rank in sorted(answers)]

    def _judge(self, answers: dict[int, dict[str, Any]], limit_s: float) -> None:
        for answer in answers.values():
            if "input_error" in answer:
                raise InputError(answer["input_error"])
        errors = {rank: answer for rank, answer in sorted(answers.items()) if "error" in answer}
        if errors:
            # A rank that only lost the others is not the cause, if another one has an account of its own.
            rank, first = min(errors.items(), key=lambda item: bool(item[1]["lost"]))
            raise BrokenPool("unsupported" if first["unsupported"] else "failed", f"rank {rank}: {first['error']}")
        silent = sorted(set(range(self.task.placement.ranks)) - set(answers))
        if not silent:
            return
        if codes := self._pool.exit_codes():
            raise BrokenPool("failed", f"the ranks ended (exit code {codes[0]}): {self._pool.last_words()}")
        names = ", ".join(map(str, silent))
        raise BrokenPool("hang", f"no answer from rank {names} within {limit_s:g} s")

    def end(self, politely: bool) -> None:
        """Let the ranks part in order if they can; in any case none is left afterwards."""
        if politely:
            with suppress(BrokenPool, OSError):
                self._pool.tell({"do": "leave"})
                self._collect(LEAVE_S)
                self._pool.wait(LEAVE_S)
        for path in self.folder.glob("ranks/*/pid"):
            with suppress(OSError, ValueError):
                self._segments.update(segments.of_rank(int(path.read_text()), self.folder))
        self._pool.end()
        for name, inode in self._segments:
            segments.remove(name, inode)


def unavailable(backend: str, device: str, ranks: int, where: Placement | None = None) -> str | None:
    """Why a backend cannot be tried on this machine: what `missing` sees, or no launcher for its ranks. Slurm's nodes may have what this one lacks."""
    by_slurm = where is not None and where.launcher == "slurm"
    reason = None if by_slurm else missing(backend, device)
    if reason is None and backend == "mpi" and not by_slurm:
        try:
            mpirun.choose(placement_for(backend, device, ranks, START_S))
        except InputError as error:
            return str(error)
    return reason


def wrong_result(answers: list[dict[str, Any]], placement: Placement) -> str | None:
    """The first rank's result that is wrong; None where all are right."""
    wrong = (f"rank {rank}: {answer['wrong']}" for rank, answer in enumerate(answers) if answer["wrong"])
    # Hosts have clocks of their own, so moments of different ones say nothing; emulated hosts have this machine's.
    clock = placement.ranks if placement.emulated else ranks_per_host(placement)
    hosts = range(0, placement.ranks, clock)
    return next(wrong, None) or next((early for at in hosts if (early := left_early(answers, at, clock))), None)


def left_early(answers: list[dict[str, Any]], at: int = 0, count: int | None = None) -> str | None:
    """Whether a rank left a barrier before another one had come to it; of `count` ranks from `at` on, whose clocks are the same."""
    moments = [answer["moments"] for answer in answers[at:][:count]]
    if any(pair is None for pair in moments):
        return None
    came, went = [pair[0] for pair in moments], [pair[1] for pair in moments]
    if max(came) <= min(went):
        return None
    early, late = at + went.index(min(went)), at + came.index(max(came))
    return f"rank {early} left the barrier {(max(came) - min(went)) / 1e6:.1f} ms before rank {late} came to it"
