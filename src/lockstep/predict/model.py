"""The closed form: a step of N ranks, split by cause. docs/predict.md explains it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
import numpy as np

from lockstep.launch.emulated.link import Link
from lockstep.placement import Placement
from lockstep.predict.compute import at
from lockstep.predict.exchange import NO_DETOUR, NO_LINK, Between, Cluster, Cost, Detour, cost_of
from lockstep.predict.fit import Fit
from lockstep.predict.messages import ROUNDS, Message, exposed, messages
from lockstep.predict.waiting import slowest

# A slope counts if it is at least this many standard errors.
SURE = 2.0


@dataclass(frozen=True)
class Case:
    """What to predict: passes of one rank, and where the ranks are."""

    micro: int
    """Samples in one pass of one rank."""
    accumulation: int = 1
    hosts: int = 1
    per_host: int = 1
    sharing: int | None = None
    """Ranks that share one machine's cores, if these are not the ranks of one host: emulated hosts share all cores."""
    link: Link | Between = NO_LINK
    algorithm: str = "auto"
    every: int | None = None
    """Ranks train alone and average their weights every N steps."""
    detour: Detour = NO_DETOUR

    @property
    def ranks(self) -> int:
        return self.hosts * self.per_host

    @property
    def share(self) -> int:
        """Samples of one rank in a step."""
        return self.micro * self.accumulation


@dataclass(frozen=True)
class Step:
    """Seconds of a step by cause; they add up."""

    compute: float
    """One rank by itself, without a strategy."""
    wrapper: float = 0.0
    contention: float = 0.0
    exchange: float = 0.0
    """The exposed part."""
    waiting: float = 0.0
    """Waiting for the slowest rank."""

    @property
    def seconds(self) -> float:
        return self.compute + self.wrapper + self.contention + self.exchange + self.waiting


def predict(fit: Fit, case: Case) -> Step:
    """The step, with the correction measured where this host's ranks trained together."""
    step = bare(fit, case)
    if case.ranks == 1:
        return step
    return replace(step, exchange=step.exchange + beyond(fit, case) / (rounds(fit, case) or 1))


def bare(fit: Fit, case: Case) -> Step:
    """The closed form alone."""
    parts = fit.parts(case.micro, case.accumulation, case.sharing or case.per_host)
    if case.ranks == 1:
        return Step(parts.compute)
    every = rounds(fit, case)
    cost = costs(fit, case)
    if every:
        exchange = sum(cost(message).seconds for message in sent(fit, case)) / every
        alone = Step(parts.compute, 0.0, parts.contention, exchange)  # no wrapper: gradients are not exchanged
    else:
        wrapper = parts.wrapper + divided(fit, case)
        alone = Step(parts.compute, wrapper, parts.contention, exposed(sent(fit, case), parts.backward, cost))
    # Emulated hosts are one machine, whose disturbances all of them have in common.
    late = slowest(fit.noise, case.ranks, every or 1, case.sharing or case.per_host)
    waiting = (alone.seconds - alone.exchange) * late
    return replace(alone, waiting=waiting)


def beyond(fit: Fit, case: Case) -> float:
    """Seconds that an exchange takes longer than the form says: as measured, for as many messages as were measured."""
    more = missed(fit, case.micro)
    return more if rounds(fit, case) else more * len(sent(fit, case)) / len(sent(fit, own(fit, case.micro)))


def own(fit: Fit, micro: int) -> Case:
    """The ranks that were measured."""
    return Case(micro=micro, per_host=fit.placement.ranks)


def divided(fit: Fit, case: Case) -> float:
    """Seconds that an optimizer which is divided over the ranks takes longer than a whole one: less than nothing."""
    if rounds(fit, case):
        return 0.0
    turns = max(1.0, (case.sharing or case.per_host) / fit.room)
    return turns * at(fit.compute.alone, case.micro).optimizer * (fit.update(case.ranks) - 1)


def costs(fit: Fit, case: Case) -> Callable[[Message], Cost]:
    """What each message takes."""
    clusters = {name: cluster(fit, case, name) for name in {message.collective for message in sent(fit, case)}}

    def cost(message: Message) -> Cost:
        found = cost_of(carrying(clusters[message.collective], message), case.algorithm, message.bytes)
        return found._replace(seconds=found.seconds / message.beside)

    return cost


class Path(NamedTuple):
    """What all messages of a step go through, one after the other."""

    messages: float
    hops: float
    trips: float


def path(fit: Fit, case: Case) -> Path:
    every = [(one, carrying(cluster(fit, case, one.collective), one)) for one in sent(fit, case) if one.bytes]
    return Path(
        sum(1 / one.beside for one, _ in every),
        sum(over.hops / one.beside for one, over in every),
        sum(over.trips(one.bytes) / one.beside for one, over in every),
    )


def cluster(fit: Fit, case: Case, collective: str) -> Cluster:
    # Whoever is needed next waits for the others on its core. It was measured with two ranks on each: one other.
    others = math.ceil(case.per_host * (fit.placement.threads or 1) / fit.cores) - 1
    software = fit.software_for(case.ranks, collective)
    return Cluster(
        case.hosts, case.per_host, case.link, software, fit.spare, case.detour, crowding_s=fit.crowding_s * others
    )


def carrying(cluster: Cluster, message: Message) -> Cluster:
    """The same for what a message is like."""
    return replace(cluster, number=message.number, follows=message.follows)


def rounds(fit: Fit, case: Case) -> int | None:
    """Steps between two averages of weights; None where gradients are exchanged in every step."""
    if case.every is not None:
        return case.every
    return fit.placement.local_sgd.every if fit.placement.strategy in ROUNDS else None


def sent(fit: Fit, case: Case) -> list[Message]:
    """The messages of a step, or of the end of a round."""
    placement: Placement = msgspec.structs.replace(fit.placement, ranks=case.ranks)
    if case.every is not None:
        placement = msgspec.structs.replace(placement, strategy="local-sgd", zero=False)
    clips = fit.recipe.optimizer.clip_norm is not None
    return messages(placement, fit.gradients, fit.norms, case.accumulation, clips)


def missed(fit: Fit, micro: float) -> float:
    """Seconds of an exchange that the closed form misses: the measured training step minus its prediction.

    Messages measured one after the other have warm caches; those of a training step do not, and a large exchange slows the
    computing beside it. So the term may grow with the batch; it does so only if the slope is significant.
    """
    if not fit.together:
        return 0.0
    every = rounds(fit, Case(micro=1)) or 1
    left = []
    for one in fit.together:
        case = own(fit, one.samples)
        known = bare(fit, case)
        left.append((one.beyond - known.exchange - known.waiting - divided(fit, case)) * every)
    samples = np.array([one.samples for one in fit.together], dtype=float)
    # Long steps vary by more from round to round than an exchange takes, so each is weighted by its precision.
    precision = np.array([1 / (one.spread * every) for one in fit.together])
    if len(set(samples)) > 1:
        line, covariance = np.polyfit(samples, left, 1, w=precision, cov="unscaled")
        if abs(line[0]) >= SURE * covariance[0, 0] ** 0.5:
            return float(np.polyval(line, np.clip(micro, samples.min(), samples.max())))
    return float(np.average(left, weights=precision**2))
