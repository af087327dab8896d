"""A group of the backend `shm`: who is on which host, and from the steps of a collective to what torch waits for."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from datetime import timedelta
from itertools import chain
from typing import Any

from torch.distributed import ProcessGroup, Work

from lockstep.backends.python_group import PythonGroup
from lockstep.backends.shm import meet
from lockstep.backends.shm.local import Local
from lockstep.backends.shm.segment import NAP_S, YIELD_S, Need
from lockstep.backends.work import Done, Pending, ProgressThread
from lockstep.torch_private import PrefixStore, Store, gloo_group, untraced

NAME = "lockstep_shm"
Steps = Generator[Need | Work, None, None]
"""A collective under way: it yields what it has to wait for."""


@untraced
class ShmBase(PythonGroup):
    """One rank's end of the group."""

    backend_name = NAME

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, names: Sequence[int]) -> None:
        super().__init__(store, rank, size)
        shm = PrefixStore("shm/", store)
        seconds = timeout.total_seconds()
        cards = meet.exchange_cards(shm, rank, names, seconds)
        hosts = meet.hosts_of(cards)
        self._host = next(i for i, members in enumerate(hosts) if rank in members)
        self._members = hosts[self._host]
        self._host_of = {member: i for i, members in enumerate(hosts) for member in members}
        self._one_host = len(hosts) == 1
        self._local = Local(meet.open_segment(shm, rank, self._members, cards, names, seconds))
        self._gloo: ProcessGroup | None = None
        self._between: ProcessGroup | None = None
        try:
            self._gloo = gloo_group(PrefixStore("gloo/", store), rank, size, timeout)
            if not self._one_host and rank == self._members[0]:
                self._between = gloo_group(PrefixStore("leaders/", store), self._host, len(hosts), timeout)
        except RuntimeError:
            self._local.close()
            raise
        self._progress = ProgressThread("lockstep-shm")

    def _run(self, steps: Iterator[Need | Work], result: Any, opts: Any) -> Work | None:
        """Carry it out here; or, where another rank is late and the caller does not wait for it, behind the caller's back: it
        may be just what that rank is waiting for. Handing it over at once would cost more than most collectives take."""
        brief = getattr(opts, "asyncOp", True)
        need: Need | Work | None = None
        if not self._progress.queue:
            for need in steps:
                if not self._wait(need, brief):
                    break
            else:
                # A caller who waits anyway takes None for "done", and making a Work takes a microsecond of the ten.
                return Done(result) if brief else None

        def rest() -> None:
            for missing in steps if need is None else chain((need,), steps):
                if isinstance(missing, tuple):
                    self._local.sleep_until(missing)
                else:
                    missing.wait()

        return self._progress.add(Pending(rest, result, "shm"))

    def _wait(self, need: Need | Work, brief: bool) -> bool:
        if isinstance(need, tuple):
            return self._local.wait(need, brief)
        until = time.monotonic() + YIELD_S
        while brief and not need.is_completed():
            if time.monotonic() > until:
                return False
            time.sleep(NAP_S)
        need.wait()
        return True

    def begun(self) -> int:
        return self._local.begun()

    @property
    def _inner(self) -> ProcessGroup:
        if self._gloo is None:
            raise RuntimeError("this process group was shut down")
        return self._gloo

    def shutdown(self) -> None:
        self._local.give_up("it was shut down")
        self._progress.end()
        self._local.close()
        self._gloo = self._between = None

    abort = shutdown
