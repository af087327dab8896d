"""A step replayed event by event: every rank computes in its own time, every message goes hop by hop over the links.

The events of all ranks at one hop are one numpy vector, so ten thousand ranks take seconds. Without noise it gives what the closed form
(model.py) gives; with it, it shows what the closed form only estimates: how delays of single ranks travel around a ring, and what one
straggler costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lockstep.predict.exchange import Cluster, all_reduce
from lockstep.predict.fit import Fit
from lockstep.predict.messages import Message
from lockstep.predict.model import Case, cluster, missed, rounds, sent

Times = np.ndarray[Any, Any]
Exchange = Callable[[Times, float], Times]


@dataclass(frozen=True)
class Script:
    """What every rank does in a step, in seconds."""

    before: float
    """All that is not the last backward pass; its order makes no difference to a step's length."""
    backward: float
    after: float
    """With every exchange, beyond its messages: what the closed form was found to miss."""
    messages: Sequence[Message]
    cluster: Cluster
    algorithm: str = "auto"
    every: int = 1
    """Messages are sent in every so many steps."""
    in_backward: bool = True
    """Whether they can start before the backward pass is over."""


@dataclass
class Replay:
    """What happened, with times from the start."""

    step: float
    """Mean seconds of a step, which is over when the last rank is."""
    waiting: float
    """Mean seconds of a step that a rank stood still for others before a message could start."""
    timeline: list[dict[str, list[float]]] = field(default_factory=list)
    """Of each step: for every rank, when it began, had computed, had exchanged, and was done."""


def script_of(fit: Fit, case: Case) -> Script:
    """The closed form's own ingredients, one by one."""
    parts = fit.compute.parts(case.micro, case.accumulation, case.sharing or case.per_host)
    every = rounds(fit, case)
    whole = parts.compute + parts.contention + (0.0 if every else parts.wrapper)
    if case.ranks == 1:
        return Script(parts.compute - parts.backward, parts.backward, 0.0, [], cluster(fit, case))
    return Script(
        whole - parts.backward,
        parts.backward,
        missed(fit, case.micro),
        sent(fit, case),
        cluster(fit, case),
        case.algorithm,
        every or 1,
        in_backward=every is None,
    )


def replay(
    script: Script,
    steps: int,
    noise: Sequence[float] = (),
    slow: tuple[int, float] | None = None,
    seed: int = 0,
    keep: bool = False,
) -> Replay:
    """`noise`: deviations to draw every rank's step from. `slow`: a rank, and how many times as long it computes. `keep`: the timeline."""
    ranks = script.cluster.ranks
    chance = np.random.default_rng(seed)
    factors = np.ones(ranks)
    if slow:
        factors[slow[0]] = slow[1]
    drawn = np.asarray(noise, dtype=float) if len(noise) else np.zeros(1)
    exchange = exchange_of(script)
    now, stood = np.zeros(ranks), 0.0
    timeline = []
    for number in range(1, steps + 1):
        pace = factors * (1 + drawn[chance.integers(len(drawn), size=ranks)])
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
    """All messages of a step, one after the other; what needs a processor is never hidden."""
    end, busy, stood = turned, 0.0, 0.0
    for message in script.messages:
        ready = turned + message.ready * (computed - turned) if script.in_backward else computed
        start = np.maximum(end, ready)
        stood += float((start.max() - start).mean())
        end = exchange(start, message.bytes)
        busy += all_reduce(script.cluster, script.algorithm, message.bytes).busy
    return np.maximum(end, computed + (busy if script.in_backward else 0.0)), stood


def exchange_of(script: Script) -> Exchange:
    """The algorithm hop by hop: from when each rank can start to when each has the result."""
    chosen = script.algorithm
    if chosen == "auto":
        one = sum(message.bytes for message in script.messages)
        ways = ("ring", "tree") if script.cluster.software.backend in ("mpi", "nccl") else ("ring",)
        chosen = min(ways, key=lambda way: all_reduce(script.cluster, way, one))
    hops = {"ring": _ring, "tree": _tree, "hierarchical": _hierarchical}[chosen]
    return lambda start, size: hops(script.cluster, start, size)


def _ring(cluster: Cluster, start: Times, size: float) -> Times:
    ranks, part = cluster.ranks, size / cluster.ranks
    # The first rank of a host gets its part from another host.
    first = np.arange(ranks) % cluster.per_host == 0
    hop = np.where(first & (cluster.hosts > 1), cluster.far(part), cluster.near(part))
    return _around(start, hop, 2 * (ranks - 1))


def _around(start: Times, hop: Times, hops: int) -> Times:
    """Each rank passes on to the next what it has, once both are ready; all at once, `hops` times."""
    now, before = start.copy(), np.empty_like(start)
    for _ in range(hops):
        before[1:], before[0] = now[:-1], now[-1]
        np.maximum(now, before, out=now)
        now += hop
    return now


def _tree(cluster: Cluster, start: Times, size: float) -> Times:
    near, far, per_host = cluster.near(size), cluster.far(size), cluster.per_host

    def cost(low: Times, high: Times) -> Times:
        return np.where(low // per_host == high // per_host, near, far)

    return _up_and_down(start, cost)


def _up_and_down(
    start: Times, cost: Callable[[Times, Times], Times], top: Callable[[Times], Times] | None = None
) -> Times:
    """Level by level to the first rank, what the top does, and back. `start` may have several such trees, one in each row."""
    now = np.atleast_2d(start).copy()
    count = now.shape[1]
    apart = 1
    pairs = []
    while apart < count:
        low = np.arange(0, count - apart, 2 * apart)
        pairs.append((low, low + apart))
        apart *= 2
    for low, high in pairs:
        now[:, low] = np.maximum(now[:, low], now[:, high]) + cost(low, high)
    if top:
        now[:, 0] = top(now[:, 0])
    for low, high in reversed(pairs):
        now[:, high] = np.maximum(now[:, high], now[:, low]) + cost(low, high)
        now[:, low] += cost(low, high)  # sending takes it as long
    return now.reshape(start.shape)


def _hierarchical(cluster: Cluster, start: Times, size: float) -> Times:
    near, hosts = cluster.near(size), cluster.hosts
    hop = np.full(hosts, cluster.far(size / hosts))
    return _up_and_down(
        start.reshape(hosts, cluster.per_host),
        lambda low, high: np.full(len(low), near),
        lambda leaders: _around(leaders, hop, 2 * (hosts - 1)) if hosts > 1 else leaders,
    ).reshape(start.shape)
