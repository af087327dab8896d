"""Decides which nodes, cores and links are slow or wrong.

Speeds are compared within each round with the median of the others: who is slower in every round, and clearly so in
the middle one, is named. What disturbs everybody, or one for a moment, accuses nobody.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

from lockstep.preflight.seen import Node, Seen
from lockstep.units import counted, digits

Key = TypeVar("Key", bound=Hashable)
# By how much slower than the others counts, in the middle round; half of it is needed in every round.
CORE, MEMORY, WRITE, RATE, LATENCY = 0.15, 0.3, 2.0, 0.3, 1.0
# Below this a difference in latency is the work of the scheduler.
LATENCY_US = 100.0
# Of fewer rounds nobody is accused: seven that all fall on one side happen once in 128 by chance.
FEWEST = 5
FEWEST_WRITES = 3
FREE = 0.75
"""A core that gives us less of its time than this in every round has something else to do."""
SKEW_S = 0.1
DISK_BYTES, SHM_BYTES = 1 << 30, 128 << 20
VERSIONS = ("lockstep", "torch", "python")


class Finding(NamedTuple):
    kind: Literal[
        "silent", "late", "folder", "version", "address", "clock", "space", "busy", "core", "memory", "write", "link"
    ]
    where: str
    text: str
    fix: str


class Slow(NamedTuple):
    ratio: float
    """How many times as slow as the median of the others, in the middle round."""
    low: float
    high: float
    """Over the rounds."""

    def __str__(self) -> str:
        return f"{digits(self.ratio, 3)} times as slow as the median of the others ({digits(self.low, 3)}–{digits(self.high, 3)} over the rounds)"


def slow(times: Mapping[Key, Sequence[float]], margin: float, fewest: int = FEWEST) -> dict[Key, Slow]:
    """Who takes longer than the median of the others in every round, by `margin` in the middle one. `times`: by round, the longer the slower."""
    # Who was lost on the way is left out, and hides nobody else.
    rounds = max((len(each) for each in times.values()), default=0)
    times = {key: each for key, each in times.items() if len(each) == rounds}
    if len(times) < 2 or rounds < fewest:
        return {}
    found = {}
    for key, mine in times.items():
        others = [each for other, each in times.items() if other != key]
        ratios = sorted(mine[at] / statistics.median(each[at] for each in others) for at in range(rounds))
        middle = statistics.median(ratios)
        if middle > 1 + margin and ratios[0] > 1 + margin / 2:
            found[key] = Slow(middle, ratios[0], ratios[-1])
    return found


def judge(seen: Seen) -> list[Finding]:
    """All that is slow or wrong, what keeps a training from starting first."""
    return [
        *_silent(seen),
        *_folder(seen),
        *_versions(seen.nodes),
        *_addresses(seen),
        *_clocks(seen.nodes),
        *_space(seen.nodes),
        *_busy(seen.nodes),
        *_cores(seen.nodes),
        *_memory(seen.nodes),
        *_writes(seen.nodes),
        *_links(seen),
    ]


def _silent(seen: Seen) -> Iterator[Finding]:
    for node in seen.nodes:
        if node.lost:
            yield Finding("silent", node.name, f"does not answer ({node.lost})", "look at it, or leave it out")
        elif node.late:
            yield Finding(
                "late", node.name, f"answers late: {node.late}", "look for other work and slow file systems there"
            )


def _folder(seen: Seen) -> Iterator[Finding]:
    for node in seen.nodes:
        if node.shared is False:
            yield Finding(
                "folder",
                node.name,
                f"does not share {seen.folder.rpartition('/')[0]}: what one node writes there, the other does not see",
                "choose a shared folder with --runs",
            )


def _versions(nodes: Sequence[Node]) -> Iterator[Finding]:
    known = [node for node in nodes if node.facts]
    for package in VERSIONS:
        usual = _usual(node.facts[package] for node in known)
        for node in known:
            if node.facts[package] != usual:
                yield Finding(
                    "version",
                    node.name,
                    f"has {package} {node.facts[package]}, the others {usual}",
                    "install the same everywhere (one environment on a shared file system)",
                )


def _usual(values: Iterable[object]) -> object:
    """What most have; of two the first."""
    counted_ = Counter(values)
    return counted_.most_common(1)[0][0] if counted_ else None


def _addresses(seen: Seen) -> Iterator[Finding]:
    """An address of loopback means the node itself to every other one."""
    for node in seen.nodes:
        address = str(node.facts.get("address", ""))
        cut_off = any(link.problem for link in seen.links if node.rank in (link.source, link.target))
        if address.startswith("127.") and cut_off:
            yield Finding(
                "address",
                node.name,
                f"calls itself {address}, where no other node can reach it",
                "set GLOO_SOCKET_IFNAME to the interface of the network between the nodes",
            )


def _clocks(nodes: Sequence[Node]) -> Iterator[Finding]:
    known = [node for node in nodes if node.skew_s is not None]
    for node in known:
        others = [other.skew_s for other in known if other is not node and other.skew_s is not None]
        assert node.skew_s is not None
        assert node.skew_within_s is not None
        away = node.skew_s - (statistics.median(others) if others else 0.0)
        if abs(away) - node.skew_within_s > SKEW_S and _further(node, known):
            how = "ahead" if away > 0 else "behind"
            yield Finding(
                "clock",
                node.name,
                f"its clock is {abs(away):.1f} s {how} of the others (to within {node.skew_within_s * 1e3:.0f} ms)",
                "let NTP set the clocks (chronyc tracking)",
            )


def _further(node: Node, known: Sequence[Node]) -> bool:
    """Of two clocks that differ, the one that differs from ours."""
    return len(known) > 2 or abs(node.skew_s or 0.0) == max(abs(other.skew_s or 0.0) for other in known)


def _space(nodes: Sequence[Node]) -> Iterator[Finding]:
    for node in nodes:
        disk, shm = node.facts.get("disk_free_bytes"), node.facts.get("shm_free_bytes")
        if disk is not None and disk < DISK_BYTES:
            yield Finding(
                "space",
                node.name,
                f"has {disk / 2**30:.1f} GiB of disk left for runs",
                "free some, or choose another --runs",
            )
        if shm is not None and shm < SHM_BYTES:
            yield Finding(
                "space",
                node.name,
                f"has {shm / 2**20:.0f} MiB of /dev/shm left",
                "give it more (mount -o remount,size=1g /dev/shm)",
            )


def _busy(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Cores that something else has, whether that makes the node slower than the others or all are alike."""
    shares = {node.rank: statistics.median(_granted(node)) for node in nodes if node.granted}
    for node in nodes:
        rounds, taken = _granted(node), busy_cores(node)
        others = [share for rank, share in shares.items() if rank != node.rank]
        beside = f"; the other nodes {statistics.median(others):.0%}" if others else ""
        rest = f"other work (load {node.facts.get('load', 0.0):.1f}) or a CPU limit has the rest"
        fix = "end it ('top' shows it), or ask for nodes of your own (--exclusive)"
        if len(rounds) >= FEWEST and max(rounds) < FREE:
            low, middle, high = min(rounds), statistics.median(rounds), max(rounds)
            said = f"gives {middle:.0%} of its cores' time ({low:.0%}–{high:.0%} over the rounds{beside}); {rest}"
            yield Finding("busy", node.name, said, fix)
        elif taken:
            which = ", ".join(f"{core} ({statistics.median(node.granted[core]):.0%})" for core in taken)
            said = (
                f"gives little of the time of {counted(len(taken), 'core').partition(' ')[2]} {which}{beside}; {rest}"
            )
            yield Finding("busy", node.name, said, fix)


def _granted(node: Node) -> list[float]:
    """The share of its time that the node gave us, by round, over its cores."""
    return [statistics.fmean(each) for each in zip(*node.granted.values(), strict=False)]


def busy_cores(node: Node) -> list[int]:
    """Those that gave us less than they should in every round: nothing is known of how fast they are by themselves."""
    return [core for core, shares in node.granted.items() if len(shares) >= FEWEST and max(shares) < FREE]


def _cores(nodes: Sequence[Node]) -> Iterator[Finding]:
    """By the time that a core gave us: what something else had of it is told above."""
    times = {
        (node.rank, core): [share / rate for rate, share in zip(rates, node.granted[core], strict=True)]
        for node in nodes
        for core, rates in node.cores.items()
        if core not in busy_cores(node)
    }
    found = slow(times, CORE)
    for node in nodes:
        mine = {core: each for (rank, core), each in found.items() if rank == node.rank}
        if not mine:
            continue
        worst = max(mine, key=lambda core: mine[core].ratio)
        if len(mine) == 1:
            which = f"core {worst} is {mine[worst]} at matrix products"
        else:
            which = (
                f"{len(mine)} of its {len(node.cores)} cores are slow at matrix products, core {worst} is {mine[worst]}"
            )
        yield Finding("core", node.name, which, "look at its clock rate, cooling and power limits")


def _memory(nodes: Sequence[Node]) -> Iterator[Finding]:
    # Of nodes with different numbers of cores, what each core gets.
    times = {node.rank: [len(node.cores) / gbs for gbs in node.memory] for node in nodes if node.memory}
    for rank, each in slow(times, MEMORY).items():
        if not busy_cores(nodes[rank]):  # or it is named already, and that is why
            yield Finding(
                "memory",
                nodes[rank].name,
                f"its memory is {each}",
                "look for a missing memory module, or NUMA settings",
            )


def _writes(nodes: Sequence[Node]) -> Iterator[Finding]:
    times = {node.rank: [1 / mbs for mbs in node.write] for node in nodes if node.write}
    for rank, each in slow(times, WRITE, FEWEST_WRITES).items():
        if not busy_cores(nodes[rank]):  # or it is named already, and that is why
            yield Finding(
                "write", nodes[rank].name, f"writes into the shared folder {each}", "look at its mount and network"
            )


def _links(seen: Seen) -> Iterator[Finding]:
    for link in seen.links:
        if link.problem and link.source < link.target:
            names = f"{seen.nodes[link.source].name} – {seen.nodes[link.target].name}"
            yield Finding(
                "link", names, f"no connection: {link.problem}", "look at firewalls, routes and GLOO_SOCKET_IFNAME"
            )
    links = [link for link in seen.links if link.gbit]
    rates = {(link.source, link.target): [1 / gbit for gbit in link.gbit] for link in links}
    yield from _rates(seen, rates, {(link.source, link.target): statistics.median(link.gbit) for link in links})
    latencies = {(link.source, link.target): link.latency_us for link in links if link.source < link.target}
    for pair, each in slow(latencies, LATENCY).items():
        took = statistics.median(latencies[pair])
        if took > LATENCY_US:
            names = " – ".join(seen.nodes[rank].name for rank in pair)
            yield Finding("link", names, f"a message takes {took:,.0f} µs, {each}", "look at the switches between them")


Pair = tuple[int, int]


def _rates(seen: Seen, times: Mapping[Pair, Sequence[float]], gbit: Mapping[Pair, float]) -> Iterator[Finding]:
    """A node whose links are all slow is named, and not each of its links. It is compared with the links that have nothing to do with it."""
    named: set[Pair] = set()
    for end, verb in ((0, "sends"), (1, "receives")):
        for node in seen.nodes:
            mine = {pair: each for pair, each in times.items() if pair[end] == node.rank}
            others = {pair: each for pair, each in times.items() if node.rank not in pair}
            if len(mine) < 2 or not others:
                continue
            against = [found for pair, each in mine.items() if (found := slow({pair: each, **others}, RATE).get(pair))]
            if len(against) == len(mine):
                named |= mine.keys()
                least, rate = min(against), digits(max(gbit[pair] for pair in mine), 3)
                said = f"{verb} at most {rate} Gbit/s, {least}"
                yield Finding("link", node.name, said, "look at its cable, port and network card")
    rest = {pair: each for pair, each in times.items() if pair not in named}
    for pair, each in slow(rest, RATE).items():
        names = " → ".join(seen.nodes[rank].name for rank in pair)
        yield Finding(
            "link",
            names,
            f"carries {digits(gbit[pair], 3)} Gbit/s, {each}",
            "look at the switches and cables between them",
        )
