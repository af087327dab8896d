"""The closed form: a step of N ranks, split by cause. docs/predict.md explains it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import msgspec
import numpy as np

from lockstep.launch.emulated.link import Link
from lockstep.placement import Placement
from lockstep.predict.exchange import NO_LINK, Cluster, all_reduce
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
    link: Link = NO_LINK
    algorithm: str = "auto"
    every: int | None = None
    """Ranks train alone and average their weights every N steps."""
    detour_s: float = 0.0
    """See `Cluster`."""

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
    return (
        step
        if case.ranks == 1
        else replace(step, exchange=step.exchange + missed(fit, case.micro) / (rounds(fit, case) or 1))
    )


def bare(fit: Fit, case: Case) -> Step:
    """The closed form alone."""
    parts = fit.compute.parts(case.micro, case.accumulation, case.sharing or case.per_host)
    if case.ranks == 1:
        return Step(parts.compute)
    every = rounds(fit, case)
    cost = partial(all_reduce, cluster(fit, case), case.algorithm)
    if every:
        exchange = sum(cost(message.bytes).seconds for message in sent(fit, case)) / every
        alone = Step(parts.compute, 0.0, parts.contention, exchange)  # no wrapper: gradients are not exchanged
    else:
        alone = Step(parts.compute, parts.wrapper, parts.contention, exposed(sent(fit, case), parts.backward, cost))
    waiting = (alone.seconds - alone.exchange) * slowest(fit.noise, case.ranks, every or 1)
    return replace(alone, waiting=waiting)


def cluster(fit: Fit, case: Case) -> Cluster:
    crowded = fit.crowding_s if case.per_host * (fit.placement.threads or 1) > fit.cores else 0.0
    software = fit.software_for(case.ranks)
    return Cluster(case.hosts, case.per_host, case.link, software, fit.spare, case.detour_s, crowded)


def rounds(fit: Fit, case: Case) -> int | None:
    """Steps between two averages of weights; None where gradients are exchanged in every step."""
    if case.every is not None:
        return case.every
    return fit.placement.local_sgd.every if fit.placement.strategy in ROUNDS else None


def sent(fit: Fit, case: Case) -> list[Message]:
    """The messages of a step, or of the end of a round."""
    placement: Placement = fit.placement
    if case.every is not None:
        placement = msgspec.structs.replace(placement, strategy="local-sgd")
    return messages(placement, fit.gradients)


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
        known = bare(fit, Case(micro=one.samples, per_host=fit.placement.ranks))
        left.append((one.beyond - known.exchange - known.waiting) * every)
    samples = np.array([one.samples for one in fit.together], dtype=float)
    # Long steps vary by more from round to round than an exchange takes, so each is weighted by its precision.
    precision = np.array([1 / (one.spread * every) for one in fit.together])
    if len(set(samples)) > 1:
        line, covariance = np.polyfit(samples, left, 1, w=precision, cov="unscaled")
        if abs(line[0]) >= SURE * covariance[0, 0] ** 0.5:
            return float(np.polyval(line, np.clip(micro, samples.min(), samples.max())))
    return float(np.average(left, weights=precision**2))
