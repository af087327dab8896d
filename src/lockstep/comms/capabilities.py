"""Which collective works on which backend and device: by really trying each one, beside what was published once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from lockstep.backends.costs.plan import Task, family, placement_for
from lockstep.comms.pool import BrokenPool, ProcessPool, unavailable, wrong_result

SIZE = 64
COLUMNS = tuple((backend, device) for backend in ("gloo", "mpi", "shm", "nccl") for device in ("cpu", "cuda"))
# In the order of the published table; torch has two forms of three of them, which not every backend has both of.
ROWS = (
    "send_recv",
    "broadcast",
    "all_reduce",
    "reduce",
    "all_gather",
    "all_gather_list",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_list",
    "all_to_all",
    "all_to_all_list",
    "barrier",
)
# The table of document A, of an old PyTorch: gloo CPU, gloo GPU, mpi CPU, mpi GPU, nccl CPU, nccl GPU.
_PUBLISHED_COLUMNS = tuple(column for column in COLUMNS if column[0] != "shm")
_PUBLISHED = {
    "send_recv": ("yes", "no", "yes", "?", "no", "yes"),
    "broadcast": ("yes", "yes", "yes", "?", "no", "yes"),
    "all_reduce": ("yes", "yes", "yes", "?", "no", "yes"),
    "reduce": ("yes", "no", "yes", "?", "no", "yes"),
    "all_gather": ("yes", "no", "yes", "?", "no", "yes"),
    "gather": ("yes", "no", "yes", "?", "no", "yes"),
    "scatter": ("yes", "no", "yes", "?", "no", "no"),
    "reduce_scatter": ("no", "no", "no", "no", "no", "yes"),
    "all_to_all": ("no", "no", "yes", "?", "no", "yes"),
    "barrier": ("yes", "no", "yes", "?", "no", "yes"),
}


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Whether one collective works on one backend and device."""

    collective: str
    backend: str
    device: str
    answer: str
    """yes, no, hangs, WRONG, or – for what is not on this machine."""
    reason: str | None = None
    published: str | None = None
    """What the old PyTorch's table said; None where it had no such column."""

    @property
    def differs(self) -> bool:
        """Whether the published answer is another one; a question mark and a dash claim nothing."""
        works = "yes" if self.answer == "yes" else "no"
        return self.answer != "–" and self.published in ("yes", "no") and self.published != works


def published(collective: str, backend: str, device: str) -> str | None:
    if (backend, device) not in _PUBLISHED_COLUMNS:
        return None
    return _PUBLISHED[family(collective)][_PUBLISHED_COLUMNS.index((backend, device))]


def try_all(ranks: int, folder: Path, limit_s: float, tell: Callable[[str], None], only: list[str]) -> list[Answer]:
    """Every row of every column; `only` narrows the backends (empty: all)."""
    found: list[Answer] = []
    for backend, device in COLUMNS:
        if only and backend not in only:
            continue
        reason = unavailable(backend, device, ranks)
        if reason is None:
            tell(f"trying {len(ROWS)} collectives on {backend}, {device} …")
            found += Trial(backend, device, ranks, folder, limit_s).answers()
        else:
            found += [_answer(row, backend, device, "–", reason) for row in ROWS]
    return found


class Trial:
    """One column. After a failure the rest is tried in fresh processes, so that one answer does not spoil the next."""

    def __init__(self, backend: str, device: str, ranks: int, folder: Path, limit_s: float) -> None:
        self.backend, self.device, self.folder, self.limit_s = backend, device, folder, limit_s
        self.placement = placement_for(backend, device, ranks, 2 * limit_s)
        self._pool: ProcessPool | None = None
        self._started = 0
        self._broken: BrokenPool | None = None

    def answers(self) -> list[Answer]:
        finished = False
        try:
            found = [self._row(row) for row in ROWS]
            finished = True
        finally:
            self._end(politely=finished)
        return found

    def _row(self, row: str) -> Answer:
        try:
            replies = self._started_pool().measure(row, SIZE, 3, 1, self.limit_s)
        except BrokenPool as lost:
            self._end(politely=False)
            return _answer(row, self.backend, self.device, "hangs" if lost.kind == "hang" else "no", lost.reason)
        wrong = wrong_result(replies, self.placement)
        return _answer(row, self.backend, self.device, "WRONG" if wrong else "yes", wrong)

    def _started_pool(self) -> ProcessPool:
        if self._broken is not None:  # it does not even start, so nothing on it works
            raise self._broken
        if self._pool is None:
            self._started += 1
            where = self.folder / f"try-{self.backend}-{self.device}-{self._started:02d}"
            self._pool = ProcessPool(Task(placement=self.placement), where)
            try:
                self._pool.start()
            except BrokenPool as lost:
                self._broken = lost
                raise
        return self._pool

    def _end(self, politely: bool) -> None:
        if self._pool is not None:
            self._pool.end(politely)
            self._pool = None


def _answer(row: str, backend: str, device: str, answer: str, reason: str | None) -> Answer:
    return Answer(
        collective=row,
        backend=backend,
        device=device,
        answer=answer,
        reason=reason,
        published=published(row, backend, device),
    )
