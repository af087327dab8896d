"""Going round by round over all cells and backends, so that a drift of the machine hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from lockstep.backends.costs.cells import Cell, summarise
from lockstep.backends.costs.plan import Task, message_bytes, placement_for
from lockstep.comms.pool import START_S, BrokenPool, ProcessPool, wrong_result
from lockstep.errors import RunFailed
from lockstep.placement import Placement
from lockstep.rounds import rounds

PROBE_CALLS = 2
LEAST_CALLS, MOST_CALLS = 3, 1000


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure and how long."""

    backends: list[str]
    device: str
    ranks: list[int]
    collectives: list[str]
    sizes: list[int]
    rounds: int
    cell_s: float
    """Timed seconds of one cell in one round."""
    limit_s: float
    """A cell without an answer after this time counts as hanging."""
    own: str | None = None
    where: Placement | None = None
    """The hosts and the launcher of the ranks; None: this host, and what each backend needs."""


Tell = Callable[[str], None]


class Bench:
    """The pools of one number of ranks, one per backend, and the cells that they fill."""

    def __init__(self, settings: Settings, ranks: int, folder: Path, tell: Tell) -> None:
        self.settings, self.ranks, self.folder, self.tell = settings, ranks, folder, tell
        self.cells: dict[tuple[str, str, int], Cell] = {}
        self._samples: dict[tuple[str, str, int], list[list[int]]] = {}
        self._pools: dict[str, ProcessPool] = {}
        self._given_up: dict[tuple[str, str], BrokenPool] = {}
        self._broken: dict[str, BrokenPool] = {}
        self._started = 0
        self._seed = 0

    def run(self) -> list[Cell]:
        finished, grid = False, list(self._grid())
        try:
            for number in range(self.settings.rounds):
                for (collective, size), backends in zip(
                    grid, rounds(self.settings.backends, len(grid), seed=number), strict=True
                ):
                    for backend in backends:
                        self._cell(backend, collective, size)
                    self.tell(f"{self.ranks} ranks, round {number + 1}/{self.settings.rounds}: {collective} {size:,} B")
            finished = True
        finally:
            for pool in self._pools.values():
                pool.end(politely=finished)
        order = {name: at for at, name in enumerate(self.settings.collectives)}
        return sorted(self.cells.values(), key=lambda c: (order[c.collective], c.bytes, c.backend))

    def _grid(self) -> Iterator[tuple[str, int]]:
        for collective in self.settings.collectives:
            for size in [0] if collective == "barrier" else self.settings.sizes:
                yield collective, size

    def _cell(self, backend: str, collective: str, size: int) -> None:
        key = (backend, collective, size)
        cell = self.cells.setdefault(
            key,
            Cell(
                backend=backend,
                device=self.settings.device,
                ranks=self.ranks,
                collective=collective,
                bytes=size,
                message_bytes=message_bytes(collective, size, self.ranks),
            ),
        )
        lost = self._broken.get(backend) or self._given_up.get((backend, collective))
        if lost and cell.state == "ok" and not cell.n:
            cell.state, cell.reason, cell.time = lost.kind, lost.reason, time.time()
        if cell.state != "ok" or lost:
            return
        try:
            pool = self._pool(backend)
        except BrokenPool as problem:
            self._lose(backend)
            self._broken[backend] = problem
            self._cell(backend, collective, size)
            return
        try:
            if key not in self._samples:
                self._take(pool, cell, PROBE_CALLS, keep=False)
            if cell.state == "ok":
                self._take(pool, cell, self._calls(key), keep=True)
        except BrokenPool as problem:
            # What it is at one size it is at the others: they are not tried, each would cost a time limit and a start.
            self._lose(backend)
            self._given_up[backend, collective] = problem
            cell.state, cell.reason, cell.time = problem.kind, problem.reason, time.time()

    def _take(self, pool: ProcessPool, cell: Cell, calls: int, keep: bool) -> None:
        self._seed += calls
        answers = pool.measure(cell.collective, cell.bytes, calls, self._seed, self.settings.limit_s)
        cell.time = time.time()
        cell.checks += sum(answer["checks"] for answer in answers)
        wrong = wrong_result(answers, pool.task.placement)
        if wrong:
            cell.state, cell.reason = "WRONG", wrong
            return
        # A call is over when the last rank has finished it.
        slowest = [max(times) for times in zip(*(answer["times_ns"] for answer in answers), strict=True)]
        rounds = self._samples.setdefault((cell.backend, cell.collective, cell.bytes), [])
        if keep and len(rounds) == 1 and not cell.n:
            rounds.clear()  # the probe
        rounds.append(slowest)
        if keep:
            summarise(cell, rounds)

    def _calls(self, key: tuple[str, str, int]) -> int:
        """As many calls as fit into the time of a cell, judged by what it took so far."""
        typical = statistics.median(sample for one in self._samples[key] for sample in one) / 1e9
        return max(LEAST_CALLS, min(MOST_CALLS, int(self.settings.cell_s / max(typical, 1e-9))))

    def _pool(self, backend: str) -> ProcessPool:
        if backend not in self._pools:
            self._started += 1
            folder = self.folder / f"{self._started:02d}-{backend}-{self.ranks}r"
            settings = self.settings
            # Ranks that start on a busy machine come late; a cell that hangs is noticed by us, long before its ranks do.
            patience = max(START_S, 2 * settings.limit_s)
            placement = placement_for(backend, settings.device, self.ranks, patience, settings.where)
            self._pools[backend] = ProcessPool(Task(placement=placement, own=settings.own), folder, self.tell)
            self.tell(f"{self.ranks} ranks: starting {backend} …")
            self._pools[backend].start()
        return self._pools[backend]

    def _lose(self, backend: str) -> None:
        if backend in self._pools:
            self._pools.pop(backend).end(politely=False)


def measure(settings: Settings, folder: Path, tell: Tell) -> list[Cell]:
    """Every cell of every number of ranks; RunFailed where not one could be measured."""
    cells: list[Cell] = []
    for ranks in settings.ranks:
        cells += Bench(settings, ranks, folder, tell).run()
    if not any(cell.n or cell.state == "WRONG" for cell in cells):
        first = cells[0]
        raise RunFailed(f"comms: nothing could be measured: {first.backend}, {first.collective}: {first.reason}")
    return cells
