"""The time of a collective of S bytes over N ranks, computed from hops. An all-reduce goes one of three ways:

    ring          2 (N - 1) hops of S / N bytes, all ranks at once
    tree          2 log2 N hops of S bytes: up to one rank, and down again
    hierarchical  up to one rank of each host, a ring of the hosts, and down again

An all-gather and a reduce-scatter are half a ring each, a broadcast is the way down a tree.

The software's own part of a hop is the measured time within this host with few ranks, divided by the hops of that ring. A link
between hosts adds its delay, and its rate where that is slower than the software. Where collectives were measured between hosts
(`--link measured`), a hop between hosts is that of the measured ring instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from lockstep.launch.emulated.link import Link
from lockstep.predict.protocol import FOLLOWING, protocol_of

NO_LINK = Link()
"""Neither rate nor delay."""
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


@dataclass(frozen=True)
class Between:
    """What was measured between hosts, in place of a link's rate and delay."""

    name: str
    """Where and when, in words."""
    software: tuple[Software, ...]
    """One for each collective."""

    def __str__(self) -> str:
        return "measured"

    def of(self, collective: str) -> Software:
        return next(one for one in self.software if one.collective == collective)


class Detour(NamedTuple):
    """What emulated hosts cost by themselves, in seconds: their packets go through processes that compete with the ranks for cores."""

    message: float = 0.0
    """Once for a collective."""
    trip: float = 0.0
    """For each packet that has to arrive before the next one is sent."""


NO_DETOUR = Detour()


class Cost(NamedTuple):
    """A collective: its time, and the part of it that needs a processor."""

    seconds: float
    busy: float


@dataclass(frozen=True)
class Cluster:
    """Hosts like this one with the same number of ranks each, and the link between them."""

    hosts: int
    per_host: int
    link: Link | Between
    software: Software
    spare: bool = False
    """Whether the hosts have spare cores, so that moving data does not slow computing."""
    detour: Detour = NO_DETOUR
    number: int = 4
    """Bytes of one of the numbers that are sent."""
    follows: bool = False
    """Whether it is a broadcast behind others that are still under way (protocol.py)."""
    crowding_s: float = 0.0
    """Extra time of a hop within a host that has more ranks than cores."""

    @property
    def ranks(self) -> int:
        return self.hosts * self.per_host

    def near(self, size: float) -> float:
        """A hop within a host."""
        return self.software.hop(size) + self.crowding_s

    def far(self, size: float, trips: float | None = None) -> float:
        """A hop between hosts, of N trips: the slower of software and link moves the bytes."""
        software, link, protocol = self.software, self.link, protocol_of(self.software.backend)
        if isinstance(link, Between):
            return link.of(software.collective).hop(size)
        trips = protocol.trips if trips is None else trips
        transfer = max(software.moving(size), 8 * size / link.rate if link.rate else 0.0)
        return software.latency + protocol.delays(size, trips) * link.delay_s + transfer + trips * self.detour.trip

    @property
    def once(self) -> float:
        """What a collective between hosts takes beside its hops."""
        return self.detour.message if self.hosts > 1 and not isinstance(self.link, Between) else 0.0

    def around(self, size: float) -> float:
        """A hop between hosts of a ring that exchanges `size` bytes in all."""
        software = self.software
        trips = protocol_of(software.backend).around(software.collective, self.ranks, size, self.number)
        return self.far(size / self.ranks, trips / software.hops(self.ranks))

    @property
    def tree(self) -> tuple[int, int]:
        """Hosts, and ranks of each, that a broadcast has to wait for."""
        if not self.follows:
            return self.hosts, self.per_host
        hosts = min(self.hosts, FOLLOWING)
        return hosts, min(self.per_host, FOLLOWING // hosts)

    def down(self, size: float) -> float:
        """A level between hosts of a broadcast."""
        hosts, _ = self.tree
        trips = protocol_of(self.software.backend).down(hosts)
        return self.far(size, trips / levels(hosts)) if trips else 0.0

    @property
    def hops(self) -> int:
        """How many follow each other."""
        hosts, per_host = self.tree
        return self.software.hops(hosts * per_host if self.software.collective == "broadcast" else self.ranks)

    def trips(self, size: float) -> float:
        """Packets of a collective of which each has to arrive before the next one is sent."""
        protocol = protocol_of(self.software.backend)
        if self.software.collective == "broadcast":
            hosts, per_host = self.tree
            return protocol.down(hosts * per_host)
        return protocol.around(self.software.collective, self.ranks, size, self.number)


def ring(cluster: Cluster, size: float) -> Cost:
    """All ranks send at the same time, so the slowest link sets the pace."""
    hops, part = cluster.software.hops(cluster.ranks), size / cluster.ranks
    paces = [cluster.near(part)] if cluster.per_host > 1 else []
    paces += [cluster.around(size)] if cluster.hosts > 1 else []
    return Cost(hops * max(paces, default=0.0) + cluster.once, hops * cluster.software.moving(part))


def tree(cluster: Cluster, size: float) -> Cost:
    within, between = levels(cluster.per_host), levels(cluster.hosts)
    seconds = 2 * (within * cluster.near(size) + between * cluster.far(size))
    return Cost(seconds + cluster.once, 2 * (within + between) * cluster.software.moving(size))


def hierarchical(cluster: Cluster, size: float) -> Cost:
    within, hops, part = levels(cluster.per_host), 2 * (cluster.hosts - 1), size / cluster.hosts
    moving = cluster.software.moving
    seconds = 2 * within * cluster.near(size) + hops * cluster.far(part)
    return Cost(seconds + cluster.once, 2 * within * moving(size) + hops * moving(part))


def broadcast(cluster: Cluster, size: float) -> Cost:
    between, within = map(levels, cluster.tree)
    seconds = within * cluster.near(size) + between * cluster.down(size)
    return Cost(seconds + cluster.once, (within + between) * cluster.software.moving(size))


def least_seconds(size: float, hosts: int, link: Link) -> float:
    """What no all-reduce between hosts can be faster than: each has to send and to receive its parts, and they are on their way for a while."""
    moved = 2 * (hosts - 1) / hosts * 8 * size / link.rate if link.rate else 0.0
    return moved + 2 * link.delay_s if hosts > 1 else 0.0


def levels(count: int) -> int:
    """Levels of a binary tree over N ranks."""
    return math.ceil(math.log2(count)) if count > 1 else 0


def cost_of(cluster: Cluster, algorithm: str, size: float) -> Cost:
    """What the cluster's collective takes; of several algorithms, the fastest."""
    if (
        cluster.ranks == 1 or size == 0
    ):  # PowerSGD sends what stays whole even where that is nothing, and gloo returns at once
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
