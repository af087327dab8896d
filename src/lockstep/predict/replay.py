"""A step replayed event by event: every rank computes in its own time, every message goes hop by hop over the links.

The events of all ranks at one level of a tree are one numpy vector, and a ring goes around in one go (ring.py), so ten thousand ranks take
seconds. Without noise it gives what the closed form
(model.py) gives; with it, it shows what the closed form only estimates: how delays of single ranks travel around a ring, and what one
straggler costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from lockstep.predict.exchange import Cluster, algorithms, cost_of
from lockstep.predict.fit import Fit
from lockstep.predict.messages import Message
from lockstep.predict.model import Case, beyond, carrying, cluster, divided, rounds, sent
from lockstep.predict.ring import Times, around
from lockstep.predict.waiting import Noise, late

Exchange = Callable[[Times, Message], Times]


@dataclass(frozen=True)
class Script:
    """What every rank does in a step, in seconds."""

    before: float
    """Everything but the last backward pass; its order does not change the length of a step."""
    backward: float
    after: float
    """Added to every exchange: the time that the closed form misses."""
    messages: Sequence[Message]
    clusters: Mapping[str, Cluster]
    """By collective."""
    algorithm: str = "auto"
    every: int = 1
    """Messages are sent every N steps."""
    in_backward: bool = True
    """Whether they can start before the backward pass is over."""
    late_together: int = 1
    """So many ranks are on one machine, and disturbed by the same."""

    @property
    def ranks(self) -> int:
        return next(iter(self.clusters.values())).ranks


@dataclass
class Replay:
    """What happened, with times from the start."""

    step: float
    """Mean seconds of a step, which ends when its last rank ends."""
    waiting: float
    """Mean seconds of a step in which a rank waited for others before a message could start."""
    timeline: list[dict[str, list[float]]] = field(default_factory=list)
    """For each step and rank: when it began, had computed, had exchanged, and was done."""


def script_of(fit: Fit, case: Case) -> Script:
    """The same inputs that the closed form uses."""
    parts = fit.parts(case.micro, case.accumulation, case.sharing or case.per_host)
    every = rounds(fit, case)
    whole = parts.compute + parts.contention + (0.0 if every else parts.wrapper)
    messages = sent(fit, case)
    collectives = {"all_reduce", *(message.collective for message in messages)}
    clusters = {name: cluster(fit, case, name) for name in collectives}
    if case.ranks == 1:
        return Script(parts.compute - parts.backward, parts.backward, 0.0, [], clusters)
    return Script(
        whole + divided(fit, case) - parts.backward,
        parts.backward,
        beyond(fit, case),
        messages,
        clusters,
        case.algorithm,
        every or 1,
        in_backward=every is None,
        late_together=case.sharing or case.per_host,
    )


def replay(
    script: Script,
    steps: int,
    noise: Noise = (),
    slow: tuple[int, float] | None = None,
    seed: int = 0,
    keep: bool = False,
) -> Replay:
    """`noise`: deviations from which every host's steps are drawn. `slow`: a rank and its slow-down factor. `keep`: keep the timeline."""
    ranks = script.ranks
    chance = np.random.default_rng(seed)
    factors = np.ones(ranks)
    if slow:
        factors[slow[0]] = slow[1]
    hosts = ranks // script.late_together
    exchange = exchange_of(script)
    now, stood = np.zeros(ranks), 0.0
    timeline = []
    for number in range(1, steps + 1):
        pace = factors * (1 + late(noise).drawn(hosts, script.late_together, chance)) if noise else factors
        began, turned = now, now + script.before * pace
        computed = turned + script.backward * pace
        now = computed
        if number % script.every == 0 and script.messages:
            now, waited = _exchange(script, exchange, turned, computed)
            stood += waited
            now = now + script.after
        exchanged = now
        if keep:
            names = ("began", "computed", "exchanged")
            timeline.append(dict(zip(names, (t.tolist() for t in (began, computed, exchanged)), strict=True)))
    return Replay(float(now.max()) / steps, stood / steps, timeline)


def _exchange(script: Script, exchange: Exchange, turned: Times, computed: Times) -> tuple[Times, float]:
    """All messages of a step, one after the other; their processor time is never hidden."""
    end, paused, busy, stood = turned, np.zeros_like(turned), 0.0, 0.0
    for message in script.messages:
        ready = turned + message.ready * (computed - turned) + paused if script.in_backward else computed
        start = np.maximum(end, ready)
        stood += float((start.max() - start).mean())
        end = exchange(start, message)
        if message.waits:
            paused = paused + (end - ready)
        else:
            busy += cost_of(script.clusters[message.collective], script.algorithm, message.bytes).busy
            paused = paused + (start - ready if message.after_others else 0.0)
    return np.maximum(end, computed + (paused + busy if script.in_backward else 0.0)), stood


def exchange_of(script: Script) -> Exchange:
    """Run the algorithm hop by hop: from the time each rank can start to the time each has the result."""
    ways = {"ring": _ring, "tree": _tree, "hierarchical": _hierarchical, "broadcast": _broadcast}
    chosen = {}
    for collective, one in script.clusters.items():
        whole = sum(message.bytes for message in script.messages if message.collective == collective)
        choice = algorithms(one, script.algorithm)
        chosen[collective] = ways[min(choice, key=partial(cost_of, one, size=whole))]

    def exchange(start: Times, message: Message) -> Times:
        if not message.bytes:
            return start
        over = carrying(script.clusters[message.collective], message)
        if message.beside > 1:  # several are under way: all ranks are done with it at about the same time
            return np.full_like(
                start, start.max() + cost_of(over, script.algorithm, message.bytes).seconds / message.beside
            )
        return chosen[message.collective](over, start, message.bytes) + over.once

    return exchange


def _ring(cluster: Cluster, start: Times, size: float) -> Times:
    ranks, part = cluster.ranks, size / cluster.ranks
    # The first rank of a host gets its part from another host.
    first = np.arange(ranks) % cluster.per_host == 0
    far = cluster.around(size) if cluster.hosts > 1 else 0.0
    hop = np.where(first & (cluster.hosts > 1), far, cluster.near(part))
    return around(start, hop, cluster.software.hops(ranks))


def _tree(cluster: Cluster, start: Times, size: float) -> Times:
    near, far, per_host = cluster.near(size), cluster.far(size), cluster.per_host

    def cost(low: Times, high: Times) -> Times:
        return np.where(low // per_host == high // per_host, near, far)

    return _up_and_down(start, cost)


def _up_and_down(
    start: Times, cost: Callable[[Times, Times], Times], top: Callable[[Times], Times] | None = None
) -> Times:
    """Level by level up to the first rank, then `top`, then back down. Each row of `start` is a separate tree."""
    now = np.atleast_2d(start).copy()
    pairs = _pairs(now.shape[1])
    for low, high in pairs:
        now[:, low] = np.maximum(now[:, low], now[:, high]) + cost(low, high)
    if top:
        now[:, 0] = top(now[:, 0])
    for low, high in reversed(pairs):
        now[:, high] = np.maximum(now[:, high], now[:, low]) + cost(low, high)
        now[:, low] += cost(low, high)  # the sender is busy for as long
    return now.reshape(start.shape)


def _pairs(count: int) -> list[tuple[Times, Times]]:
    """Who meets whom on each level of a tree, from the leaves to the root."""
    apart = 1
    found = []
    while apart < count:
        low = np.arange(0, count - apart, 2 * apart)
        found.append((low, low + apart))
        apart *= 2
    return found


def _down(start: Times, hop: float) -> Times:
    """From the first of each row to the others."""
    now = start.copy()
    for low, high in reversed(_pairs(now.shape[1])):
        now[:, high] = np.maximum(now[:, high], now[:, low]) + hop
        now[:, low] += hop
    return now


def _broadcast(cluster: Cluster, start: Times, size: float) -> Times:
    """From the first rank to one of every host, and on within each."""
    now = start.reshape(cluster.hosts, cluster.per_host).copy()
    now[:, 0] = _down(now[:, :1].T, cluster.down(size))[0]
    return _down(now, cluster.near(size)).reshape(start.shape)


def _hierarchical(cluster: Cluster, start: Times, size: float) -> Times:
    near, hosts = cluster.near(size), cluster.hosts
    hop = np.full(hosts, cluster.far(size / hosts))
    return _up_and_down(
        start.reshape(hosts, cluster.per_host),
        lambda low, high: np.full(len(low), near),
        lambda leaders: around(leaders, hop, 2 * (hosts - 1)) if hosts > 1 else leaders,
    ).reshape(start.shape)
