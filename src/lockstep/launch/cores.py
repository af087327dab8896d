"""Cores of one's own: two runs are never pinned to one core while another core is idle.

Whoever watches a run holds the cores that its ranks are pinned to, each by a socket whose name says which core it is. A name in
Linux's abstract namespace belongs to one process of the machine, of whichever user, and goes with that process, however it ends:
there is no file that could be left behind.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.placement import Placement, elsewhere, ranks_per_host
from lockstep.process import CORES

NAME = "\0lockstep-core-"
_held: dict[int, socket.socket] = {}
_users = 0
_lock = threading.Lock()
"""Placements that take turns are started by as many threads."""


@contextmanager
def cores_of(placement: Placement) -> Iterator[dict[str, str]]:
    """What the ranks' environment says about cores, while they are held: which to be pinned to, or that they are not pinned.

    Placements that one process runs at the same time take turns, so they share the cores that it holds.
    """
    global _users
    # On a cluster the cores are Slurm's to give, and the ranks are elsewhere.
    if not placement.pin or placement.device != "cpu" or elsewhere(placement) or CORES in os.environ:
        yield {}
        return
    local = placement.ranks if placement.emulated else ranks_per_host(placement)
    with _lock:
        _users += 1
        held = _hold(local * (placement.threads or 1))
    try:
        yield {CORES: held}
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _release(list(_held))


def _hold(wanted: int) -> str:
    """All of them, or none: of ranks that wait for each other, one that is pinned gains nothing while another is not."""
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    before = list(_held)
    for core in usable:
        if len(_held) >= wanted:
            break
        if core not in _held and (name := _take(core)) is not None:
            _held[core] = name
    if len(_held) < wanted:
        _release([core for core in _held if core not in before])
        return "any:" + ",".join(map(str, usable))
    return ",".join(map(str, list(_held)[:wanted]))


def _take(core: int) -> socket.socket | None:
    name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        name.bind(f"{NAME}{core}")
    except OSError:  # another run holds it; or names cannot be had here, and then nobody is pinned
        name.close()
        return None
    return name


def _release(cores: list[int]) -> None:
    for core in cores:
        _held.pop(core).close()
