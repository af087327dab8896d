"""Who shares a host with whom, and how they come to share memory. Ranks meet in the group's store.

The memory never has a name: it is a memfd of the host's first rank, which the others open through /proc. So there is
nothing in /dev/shm that a kill could leave behind, and the size of /dev/shm (64 MB in many containers) is no limit.
"""

from __future__ import annotations

import json
import mmap
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from lockstep.backends.shm.segment import Peer, Segment, segment_bytes
from lockstep.backends.work import late
from lockstep.errors import InputError
from lockstep.machine import shared_memory
from lockstep.torch_private import Store

HOST_KEY = "LOCKSTEP_HOST_KEY"
"""Overrides what a host is recognised by: ranks with the same value share memory."""


@dataclass(frozen=True)
class Card:
    """What a rank tells the others about itself."""

    host: str
    pid: int
    cores: tuple[int, ...]


def check_machine() -> None:
    """Refuse a machine on which this cannot work, in the user's terms."""
    reason = shared_memory.problem()
    if reason:
        raise InputError(f"backend=shm {reason}: choose backend=gloo")


def host_key() -> str:
    """What ranks must have in common to share memory: machine, boot, network and process namespaces.

    Network namespaces count because emulated hosts are made of them; process namespaces because pids are exchanged.
    """
    override = os.environ.get(HOST_KEY)
    if override:
        return override
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = (Path(f"/proc/self/ns/{kind}").stat().st_ino for kind in ("net", "pid"))
    return "|".join((platform.node(), boot, *map(str, spaces)))


def exchange_cards(store: Store, rank: int, names: Sequence[int], timeout: float) -> list[Card]:
    """Every rank's card, in the order of ranks. `names` are the ranks as the world knows them, for messages."""
    mine = {"host": host_key(), "pid": os.getpid(), "cores": sorted(os.sched_getaffinity(0))}
    store.set(f"card/{rank}", json.dumps(mine))
    keys = {f"card/{other}": name for other, name in enumerate(names)}
    _await(store, keys, timeout)
    cards = (json.loads(store.get(key)) for key in keys)
    return [Card(card["host"], int(card["pid"]), tuple(card["cores"])) for card in cards]


def hosts_of(cards: Sequence[Card]) -> list[list[int]]:
    """The ranks of each host; hosts in the order of their first ranks."""
    hosts: dict[str, list[int]] = {}
    for rank, card in enumerate(cards):
        hosts.setdefault(card.host, []).append(rank)
    return list(hosts.values())


def open_segment(
    store: Store, rank: int, members: Sequence[int], cards: Sequence[Card], names: Sequence[int], timeout: float
) -> Segment:
    """The memory of the `members` of one host."""
    first = members[0]
    size = segment_bytes(len(members))
    if rank == first:
        handle = _create(size)
    else:
        _await(store, {f"memory/{first}": names[first]}, timeout)
        handle = _open(store.get(f"memory/{first}").decode(), names[first])
    try:
        memory = mmap.mmap(handle, size)
        if rank == first:
            store.set(f"memory/{first}", f"/proc/{os.getpid()}/fd/{handle}")
            _await(store, {f"opened/{other}": names[other] for other in members[1:]}, timeout)
        else:
            store.set(f"opened/{rank}", "")
    finally:
        os.close(handle)
    cores = {core for member in members for core in cards[member].cores}
    peers = [Peer(names[member], cards[member].pid) for member in members]
    # With more ranks than cores the one that is waited for may need the very core that a spinning wait holds.
    return Segment(memory, members.index(rank), peers, timeout, spin=len(cores) >= len(members))


def _await(store: Store, keys: Mapping[str, int], timeout: float) -> None:
    """Wait until the ranks have set their keys: as long as the group allows. The store's own limit may be far longer."""
    try:
        store.wait(list(keys), timedelta(seconds=timeout))
    except RuntimeError:
        missing = [str(rank) for key, rank in keys.items() if not store.check([key])]
        if not missing:
            raise
        raise late("shm", timeout, f"rank {', '.join(missing)} to join the group") from None


def _create(size: int) -> int:
    handle = os.memfd_create("lockstep-shm")
    try:
        # Reserved now, so that a lack of memory is a message here and not a SIGBUS later.
        os.posix_fallocate(handle, 0, size)
    except OSError as error:
        os.close(handle)
        raise InputError(
            f"backend=shm: no room for {size:,} bytes of shared memory ({error.strerror}): choose backend=gloo"
        ) from None
    return handle


def _open(path: str, owner: int) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        raise RuntimeError(f"Connection closed by peer: rank {owner} ended before its memory was opened") from None
    except PermissionError:
        raise InputError(
            f"backend=shm: the memory of rank {owner} may not be opened: start all ranks of a host as one user, "
            "or choose backend=gloo"
        ) from None
