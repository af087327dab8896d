"""A pool of ranks: a short job on all ranks of a placement. They are started by its launcher, given orders, and ended whatever happens.

What each rank does is a worker module of its own (comms/worker.py, preflight/worker.py), started as `python -m MODULE FOLDER`. It finds its place in
its launcher's environment, and its orders at the end of its line (lockstep/lines.py).
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from lockstep.errors import InputError
from lockstep.launch.base import Start, Watched
from lockstep.launch.cores import cores_of
from lockstep.launch.emulated import launcher as emulated
from lockstep.launch.emulated import network as emulate
from lockstep.launch.launchers import starts_of
from lockstep.launch.processes import begin, end_all
from lockstep.launch.slurm import job, script
from lockstep.launch.slurm import launcher as slurm
from lockstep.lines import DESK_VARIABLE, Desk, Lines, Pipes
from lockstep.placement import Placement
from lockstep.plan import plan
from lockstep.reading import read_end
from lockstep.recipe import Recipe
from lockstep.run import Options, Run, Spec
from lockstep.text import last_line

LOOK_S = 0.2
LOG = "launcher.log"
# The modules in whose place the pool's worker is started: the one that trains, or the monitor beside it.
TRAINING = ("lockstep.worker", "lockstep.launch.monitor")


class _Enough(Exception):
    """No more waiting for ranks that have not called."""


class Pool:
    def __init__(
        self,
        placement: Placement,
        folder: Path,
        worker: str,
        together: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`together`: a rank that ends leaves the others with nothing to do, as those of a group. `environment`: more variables of the ranks."""
        self.placement, self.folder, self._worker, self._together = placement, folder, worker, together
        self._environment = environment or {}
        self._started: list[Watched] = []
        self._lines: Lines | None = None
        self._pending = [b""] * placement.ranks
        self._hung_up: set[int] = set()
        self._held = ExitStack()

    def start(self) -> None:
        """Begin to start the ranks. Raises a LockstepError, or CannotStart."""
        run = Run(self.folder)
        for rank in range(self.placement.ranks):
            run.rank_folder(rank).mkdir(parents=True)
        more = dict(self._environment)
        if self.placement.launcher == "slurm":
            # Also for one host: whoever types salloc is on another machine, as a rule.
            desk = Desk(run, self.placement.ranks, beyond_this_host=True)
            self._lines = desk
            more[DESK_VARIABLE] = desk.address
        else:
            self._lines = Pipes(run, self.placement.ranks)
        starts = self._starts()
        # Pools take turns, so those of one command share their cores.
        more |= self._held.enter_context(cores_of(self.placement))
        for start in starts:
            self._started.append(Watched(begin(start, more, self.folder / LOG), start))

    def _starts(self) -> list[Start]:
        spec = _spec(self.placement)
        if self.placement.launcher == "slurm":
            return slurm.starts_short(spec, self.folder, self._worker)
        if self.placement.emulated:
            network = self._held.enter_context(emulate.network(self.placement))
            return [self._ours(start) for start in emulated.starts(spec, self.folder, network)]
        return [self._ours(start) for start in starts_of(spec, self.folder, 0)]

    def _ours(self, start: Start) -> Start:
        words = [self._worker if word in TRAINING else word for word in start.argv]
        assert self._worker in words or start.rank is None, start.argv
        return dataclasses.replace(start, argv=words)

    def join(self, limit_s: float, tell: Callable[[str], None] = lambda text: None) -> None:
        """Wait until every rank has called, at most `limit_s` after Slurm has granted nodes."""
        assert self._lines is not None
        since = time.monotonic()

        def waiting() -> None:
            nonlocal since
            if self.queued:
                since = time.monotonic()
                tell("waiting for Slurm to give us nodes …")
            if time.monotonic() - since > limit_s or self._all_ended():
                raise _Enough

        with suppress(_Enough):
            self._lines.join(waiting)
        if self.queued and self._all_ended():
            raise InputError(job.refusal("salloc", (self.folder / LOG).read_text(errors="replace")))

    @property
    def queued(self) -> bool:
        """Whether Slurm has yet to give us nodes."""
        return (
            self.placement.launcher == "slurm"
            and not slurm.allocation()
            and not (self.folder / script.GRANTED).exists()
        )

    def tell(self, order: dict[str, Any], ranks: Iterable[int] | None = None) -> None:
        assert self._lines is not None
        ends = self._lines.orders
        for rank in ends if ranks is None else ranks:
            with suppress(OSError, KeyError):  # a rank that is gone is missed where its answer is
                os.write(ends[rank], json.dumps(order).encode() + b"\n")

    def collect(
        self,
        limit_s: float,
        ranks: Iterable[int] | None = None,
        grace: Callable[[dict[str, Any]], float | None] = lambda answer: None,
    ) -> dict[int, dict[str, Any]]:
        """One answer of every rank, of as many as give one within the limit. After some answers the others have only `grace` seconds left."""
        assert self._lines is not None
        wanted = set(range(self.placement.ranks) if ranks is None else ranks)
        answers: dict[int, dict[str, Any]] = {}
        never_called = wanted - self._lines.answers.keys()
        until = time.monotonic() + limit_s
        while missing := wanted - answers.keys():
            gone = self.gone()
            ends = {end: rank for rank, end in self._lines.answers.items() if rank in missing - self._hung_up}
            readable, _, _ = select.select(list(ends), [], [], LOOK_S)
            for end in readable:
                if answer := self._read(ends[end], end):
                    answers[ends[end]] = answer
                    if (left := grace(answer)) is not None:
                        until = min(until, time.monotonic() + left)
            nobody = missing <= gone | never_called or (self._together and bool(gone))
            if not readable and (nobody or time.monotonic() > until):
                break
        return answers

    def _read(self, rank: int, end: int) -> dict[str, Any] | None:
        try:
            data = os.read(end, 1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            self._hung_up.add(rank)
        self._pending[rank] += data
        line, newline, rest = self._pending[rank].partition(b"\n")
        if not newline:
            return None
        self._pending[rank] = rest
        answer: dict[str, Any] = json.loads(line)
        return answer

    def nodes(self) -> list[str]:
        """The names of the nodes that Slurm gave us, in the order of ranks; none where it has not, or where others start the ranks."""
        try:
            return (self.folder / script.NODES).read_text().split()
        except OSError:
            return []

    def gone(self) -> set[int]:
        """Ranks that have ended, as far as that shows here: a launcher that has ended took all of its ranks with it."""
        ended = [watched.start.rank for watched in self._started if watched.process.poll() is not None]
        if len(ended) == len(self._started) or (self._together and None in ended):
            return set(range(self.placement.ranks))
        return self._hung_up | {rank for rank in ended if rank is not None}

    def _all_ended(self) -> bool:
        return all(watched.process.poll() is not None for watched in self._started)

    def exit_codes(self) -> list[int]:
        return [watched.process.returncode for watched in self._started if watched.process.poll() is not None]

    def last_words(self) -> str:
        """The last line of any log, for a launcher that did not get as far as starting ranks."""
        logs = [self.folder / LOG, *sorted(self.folder.glob("ranks/*/log.txt"))]
        texts = (read_end(log) for log in logs if log.is_file())
        return next((line[:200] for text in texts if (line := last_line(text))), "nothing in the logs")

    def said(self, rank: int) -> str | None:
        """The last line that srun passed on from a rank, such as why it could not start; None where there is none."""
        with suppress(OSError):
            lines = (self.folder / LOG).read_text(errors="replace").splitlines()
            own = [line.partition(": ")[2] for line in lines if line.startswith(f"{rank}: ")]
            return last_line("\n".join(own))[:200] or None
        return None

    def wait(self, limit_s: float) -> None:
        """Until all processes have ended by themselves."""
        until = time.monotonic() + limit_s
        for watched in self._started:
            with suppress(subprocess.TimeoutExpired):
                watched.process.wait(max(0.1, until - time.monotonic()))

    def end(self) -> None:
        """None is left afterwards. Closing the lines ends every rank, also those that are no children of ours."""
        if self._lines is not None:
            self._lines.close()
        self._lines = None
        number = self.folder / script.GRANTED
        if not self._all_ended() and not slurm.allocation() and number.exists():
            job.end(number.read_text().strip())
        end_all(watched.process for watched in self._started)
        self._started = []
        self._held.close()


def _spec(placement: Placement) -> Spec:
    """Launchers read placement and ranks from a run's spec; there is no run here, so the rest is empty."""
    recipe = Recipe(global_batch=placement.ranks)
    planned = plan(recipe, placement, 1, 1)
    options = Options(turns=True)  # several pools share an allocation's cores
    return Spec(
        id="lockstep",
        created=time.time(),
        lockstep="",
        recipe=recipe,
        placement=placement,
        plan=planned,
        options=options,
    )
