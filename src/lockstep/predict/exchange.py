"""The time of a collective of S bytes over N ranks, computed from hops. An all-reduce goes one of three ways:

    ring          2 (N - 1) hops of S / N bytes, all ranks at once
    tree          2 log2 N hops of S bytes: up to one rank, and down again
    hierarchical  up to one rank of each host, a ring of the hosts, and down again

An all-gather and a reduce-scatter are half a ring each, a broadcast is the way down a tree.

The software's own part of a hop is the measured time within this host with few ranks, divided by the hops of that ring. A link
between hosts adds its delay, and its rate where that is slower than the software.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from lockstep.launch.emulated.link import Link

NO_LINK = Link()
"""Neither rate nor delay."""


@dataclass(frozen=True)
class Protocol:
    """How a backend sends one message between hosts."""

    trips: int
    """One-way delays in a hop."""
    window: float
    """Bytes in flight before it has to wait for the receiver again."""
    at_once: int = 1
    """How many collectives may be under way at a time: gloo has two threads for them."""

    def delays(self, size: float) -> float:
        """How many one-way delays a hop of N bytes takes."""
        return max(1.0, size / self.window) * self.trips + PACED * min(
            1.0, max(0.0, size - AT_ONCE_BYTES) / PACED_BYTES
        )


# A gloo rank says that it is ready to receive before the other one sends, so a hop takes two delays; at most two parts of 1 MiB are in
# flight at a time. Other backends are assumed to send at once; there was no second machine to measure them on.
PROTOCOLS = {"gloo": Protocol(trips=2, window=2 << 20, at_once=2)}
SENDS_AT_ONCE = Protocol(trips=1, window=math.inf)
# What TCP may send at once after a pause: ten segments. It spreads more than that over the round trip: up to 0.7 of a delay more for parts from
# 24 KB on, as measured between two emulated hosts at delays of 5 and 50 ms (docs/predict.md).
AT_ONCE_BYTES = 10 * 1448.0
PACED, PACED_BYTES = 0.7, 24e3 - AT_ONCE_BYTES
# Backends that stay within one host.
WITHIN_ONE_HOST = ("shm",)


class Software(msgspec.Struct, frozen=True, kw_only=True):
    """A collective of one backend, as measured between ranks of this host."""

    backend: str
    collective: str = "all_reduce"
    ranks: int
    points: list[tuple[float, float]]
    """Bytes and seconds, by size."""

    def whole(self, size: float) -> float:
        """Seconds: linear in log-log between the measured sizes, constant latency below and constant rate above them."""
        sizes, seconds = np.log(self.points).T
        largest = self.points[-1][0]
        within = np.interp(math.log(max(size, 1.0)), sizes, seconds)
        return math.exp(within) * max(1.0, size / largest)

    def hops(self, ranks: int) -> int:
        """How many follow each other over N ranks: around a ring, or for a broadcast down a tree."""
        if self.collective == "broadcast":
            return levels(ranks)
        half = self.collective == "all_gather" or (self.collective == "reduce_scatter" and self.backend != "gloo")
        return (1 if half else 2) * (
            ranks - 1
        )  # gloo's reduce-scatter is an all-reduce, of which a rank keeps its part

    def hop(self, size: float) -> float:
        """One of the measured hops, with `size` bytes in it."""
        parts = 1 if self.collective == "broadcast" else self.ranks
        return self.whole(size * parts) / self.hops(self.ranks)

    @property
    def latency(self) -> float:
        """The time of a hop with almost no bytes."""
        return self.hop(0)

    def moving(self, size: float) -> float:
        """The part of a hop that grows with its bytes: copying and adding, which need a processor."""
        return max(0.0, self.hop(size) - self.latency)


class Cost(NamedTuple):
    """A collective: its time, and the part of it that needs a processor."""

    seconds: float
    busy: float


@dataclass(frozen=True)
class Cluster:
    """Hosts like this one with the same number of ranks each, and the link between them."""

    hosts: int
    per_host: int
    link: Link
    software: Software
    spare: bool = False
    """Whether the hosts have spare cores, so that moving data does not slow computing."""
    detour_s: float = 0.0
    """Extra time of a hop between hosts: packets to emulated hosts go through a busy machine."""
    crowding_s: float = 0.0
    """Extra time of a hop within a host that has more ranks than cores."""

    @property
    def ranks(self) -> int:
        return self.hosts * self.per_host

    def near(self, size: float) -> float:
        """A hop within a host."""
        return self.software.hop(size) + self.crowding_s

    def far(self, size: float) -> float:
        """A hop between hosts: the slower of software and link moves the bytes."""
        software, link = self.software, self.link
        protocol = PROTOCOLS.get(software.backend, SENDS_AT_ONCE)
        transfer = max(software.moving(size), 8 * size / link.rate if link.rate else 0.0)
        return software.latency + protocol.delays(size) * link.delay_s + transfer + self.detour_s


def ring(cluster: Cluster, size: float) -> Cost:
    """All ranks send at the same time, so the slowest link sets the pace."""
    hops, part = cluster.software.hops(cluster.ranks), size / cluster.ranks
    paces = [cluster.near(part)] if cluster.per_host > 1 else []
    paces += [cluster.far(part)] if cluster.hosts > 1 else []
    return Cost(hops * max(paces, default=0.0), hops * cluster.software.moving(part))


def tree(cluster: Cluster, size: float) -> Cost:
    within, between = levels(cluster.per_host), levels(cluster.hosts)
    seconds = 2 * (within * cluster.near(size) + between * cluster.far(size))
    return Cost(seconds, 2 * (within + between) * cluster.software.moving(size))


def hierarchical(cluster: Cluster, size: float) -> Cost:
    within, hops, part = levels(cluster.per_host), 2 * (cluster.hosts - 1), size / cluster.hosts
    moving = cluster.software.moving
    seconds = 2 * within * cluster.near(size) + hops * cluster.far(part)
    return Cost(seconds, 2 * within * moving(size) + hops * moving(part))


def broadcast(cluster: Cluster, size: float) -> Cost:
    within, between = levels(cluster.per_host), levels(cluster.hosts)
    seconds = within * cluster.near(size) + between * cluster.far(size)
    return Cost(seconds, (within + between) * cluster.software.moving(size))


def least_seconds(size: float, hosts: int, link: Link) -> float:
    """What no all-reduce between hosts can be faster than: each has to send and to receive its parts, and they are on their way for a while."""
    moved = 2 * (hosts - 1) / hosts * 8 * size / link.rate if link.rate else 0.0
    return moved + 2 * link.delay_s if hosts > 1 else 0.0


def levels(count: int) -> int:
    """Levels of a binary tree over N ranks."""
    return math.ceil(math.log2(count)) if count > 1 else 0


def cost_of(cluster: Cluster, algorithm: str, size: float) -> Cost:
    """What the cluster's collective takes; of several algorithms, the fastest."""
    if cluster.ranks == 1:
        return Cost(0.0, 0.0)
    costs = {"ring": ring, "tree": tree, "hierarchical": hierarchical, "broadcast": broadcast}
    cost = min(costs[name](cluster, size) for name in algorithms(cluster, algorithm))
    return cost._replace(busy=0.0) if cluster.spare else cost


def algorithms(cluster: Cluster, algorithm: str) -> tuple[str, ...]:
    """Those that the backend chooses from. An all-reduce goes as stated; unstated, gloo's goes around a ring, and MPI and NCCL choose by size."""
    software = cluster.software
    if software.collective != "all_reduce":
        return ("broadcast" if software.collective == "broadcast" else "ring",)
    if algorithm != "auto":
        return (algorithm,)
    return ("ring", "tree") if software.backend in ("mpi", "nccl") else ("ring",)
