"""The shared memory of the ranks of one host: its layout, posting, waiting, and noticing that a peer is gone.

    per rank, 128 bytes     how far it is, and what its last two operations were
    per rank, two slots     its data of the operations with an even and with an odd number

Every operation has a number, the same on all ranks. A rank writes into its slot, then posts the number; the others wait
for the number, then read. A rank begins operation s only when all have posted s - 1, and so have read everything of s - 2:
then the slot that it used for s - 2 is free again. Two slots are enough for any series of operations.

A reader sees the data of a number that it has seen because x86 keeps stores in order, and loads too. Other processors do
not, and Python has no fence to make them, so `meet.check_machine` refuses them.
"""

from __future__ import annotations

import mmap
import os
import select
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from lockstep.backends.shm.tag import described
from lockstep.backends.work import late

LINE = 128  # two cache lines: the processor fetches them in pairs
WORDS = LINE // 8
SLOT = 512 << 10
# How long a wait holds the core, then offers it, before it sleeps. Offering costs nothing on a core of one's own.
SPINS = 1500
YIELD_S = 0.002
NAP_S = 0.00005
LONG_NAP_S = 0.001
CHECK_S = 0.02
# Naps are shorter by far: a process that did not come back for this long was stopped, perhaps with all others (Ctrl-Z, a frozen
# container). That was no waiting, and nobody is late for it.
FROZEN_S = 1.0

Need = tuple[int, int]
"""A rank's index and the number that it has to post before an operation can go on."""


@dataclass(frozen=True)
class Peer:
    """One rank of this host, as the whole world knows it."""

    rank: int
    pid: int


def segment_bytes(ranks: int) -> int:
    return ranks * (LINE + 2 * SLOT)


class Segment:
    """One rank's view of the memory that it shares with its peers."""

    def __init__(self, memory: mmap.mmap, index: int, peers: Sequence[Peer], timeout: float, spin: bool) -> None:
        self.index, self.ranks, self.timeout = index, len(peers), timeout
        self._peers = peers
        self._others = [i for i in range(len(peers)) if i != index]
        self._other_lines = [i * WORDS for i in self._others]
        self._words = memoryview(memory)[: len(peers) * LINE].cast("Q")
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._number = 0
        self._seen = 0
        self._spins = SPINS if spin else 0
        self._broken: str | None = None
        self._alive, self._handles = self._watch()

    def slot(self, index: int, parity: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """The first `count` elements of a slot, as a flat tensor of this type."""
        start = self.ranks * LINE + (2 * index + parity) * SLOT
        return self._bytes[start : start + count * dtype.itemsize].view(dtype)

    def begin(self) -> int:
        """The number of the next operation. This rank's slot of that number may be written when nobody is `missing` the one before."""
        if self._broken:
            raise RuntimeError(f"this process group is broken: {self._broken}")
        self._number += 1
        return self._number

    def in_step(self) -> bool:
        """Whether all have posted the last operation, so that the next one can begin without a wait."""
        return self._seen == self._number

    def begun(self) -> int:
        """How many operations have begun here."""
        return self._number

    def missing(self, number: int) -> Iterator[Need]:
        """Whom to wait for until all have posted this number; then that all meant the same operation. So no number goes
        unchecked: one whose caller did not wait for all is checked when the next one begins."""
        if self._seen < number:
            words = self._words
            for index in self._others:
                if words[index * WORDS] < number:
                    yield index, number
            self.check(number)
            self._seen = number

    def post(self, number: int, tag: int) -> None:
        """Say that this rank's data are there. `tag` says what the operation is: all must mean the same."""
        base = self.index * WORDS
        self._words[base + 1 + (number & 1)] = tag
        self._words[base] = number

    def check(self, number: int) -> None:
        """That all who have posted this number meant the same operation as this rank, which has posted it."""
        words, kind = self._words, 1 + (number & 1)
        tag = words[self.index * WORDS + kind]
        for base in self._other_lines:
            if words[base] >= number and words[base + kind] != tag:
                self._mismatch(base // WORDS, kind)

    def exchange(self, number: int, tag: int, brief: bool) -> bool:
        """`post`, wait for all and `check` in one, because it is what a training step waits for. With `brief`, returns False
        instead of sleeping where somebody is late."""
        words, kind, mine = self._words, 1 + (number & 1), self.index * WORDS
        words[mine + kind] = tag
        words[mine] = number
        for base in self._other_lines:
            if words[base] < number and not self.reach(base // WORDS, number):
                if brief:
                    return False
                self.sleep_until(base // WORDS, number)
            if words[base + kind] != tag:
                self._mismatch(base // WORDS, kind)
        self._seen = number
        return True

    def give_up(self, why: str) -> None:
        """Whoever waits here is to stop."""
        self._broken = self._broken or why

    def close(self) -> None:
        for handle in self._handles:
            os.close(handle)
        self._handles = []
        self._alive = None

    def reach(self, index: int, number: int) -> bool:
        """Wait for one rank to post this number, as long as the core may be held or offered."""
        words, at = self._words, index * WORDS
        for _ in range(self._spins):
            if words[at] >= number:
                return True
        until = time.monotonic() + YIELD_S
        while words[at] < number:
            if time.monotonic() > until:
                return False
            os.sched_yield()
        return True

    def sleep_until(self, index: int, number: int) -> None:
        """Wait for one rank to post this number; raise if it ended, or when the time limit is over."""
        words, at = self._words, index * WORDS
        began = seen = time.monotonic()
        check = began + CHECK_S
        while words[at] < number:
            if self._broken:
                raise RuntimeError(f"this process group is broken: {self._broken}")
            now = time.monotonic()
            if now - seen > FROZEN_S:
                began += now - seen
            seen = now
            if now >= check:
                check = now + CHECK_S
                self._check_peers(index, number)
                if now - began > self.timeout:
                    self._timed_out(index, number)
            # Short naps while the peer may come any moment; a peer that is long overdue is not worth the wake-ups.
            time.sleep(NAP_S if now - began < 50 * CHECK_S else LONG_NAP_S)

    def _watch(self) -> tuple[select.poll | None, list[int]]:
        """A handle on each peer's process: it tells of the end at once, zombies included, whoever gets the pid next."""
        poll = select.poll()
        handles: list[int] = []
        for index in self._others:
            peer = self._peers[index]
            try:
                handle = os.pidfd_open(peer.pid)
            except ProcessLookupError:
                for opened in handles:
                    os.close(opened)
                raise RuntimeError(_gone(peer)) from None
            handles.append(handle)
            poll.register(handle, select.POLLIN)
        return poll, handles

    def _check_peers(self, index: int, number: int) -> None:
        """Raise if a peer ended without having posted `number`. One that has posted it may have left in good order."""
        assert self._alive is not None
        ended = {handle for handle, _ in self._alive.poll(0)}
        if not ended:
            return
        gone = [i for i, handle in zip(self._others, self._handles, strict=True) if handle in ended]
        missing = [i for i in gone if self._words[i * WORDS] < number]
        if missing:
            first = index if index in missing else missing[0]
            self._fail(RuntimeError(_gone(self._peers[first])))

    def _timed_out(self, index: int, number: int) -> None:
        if self._words[index * WORDS] < number:
            peer = self._peers[index]
            self._fail(late("shm", self.timeout, f"rank {peer.rank} (pid {peer.pid})"))

    def _mismatch(self, index: int, kind: int) -> NoReturn:
        names = [peer.rank for peer in self._peers]
        called = (
            f"rank {names[i]} called {described(self._words[i * WORDS + kind], names)}" for i in (self.index, index)
        )
        self._fail(RuntimeError(f"ranks called different collectives: {', '.join(called)}"))

    def _fail(self, error: RuntimeError) -> NoReturn:
        self._broken = str(error)
        raise error


def _gone(peer: Peer) -> str:
    return f"Connection closed by peer: rank {peer.rank} (pid {peer.pid}) has ended"
