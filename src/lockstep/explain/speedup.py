"""Why are N ranks not N times faster? Differences between contenders within one round, each of which adds one cause (docs/explain.md).

whole / N   one process with the whole batch, divided by N: what N times as fast would be
+ batch     a rank's smaller batch is less efficient:                  plain - whole / N
+ wrapper   what the strategy costs even in a group of one:            wrapped - plain
+ contention  ranks share caches, memory and clock:                    apart - wrapped
+ exchange, waiting   as timed within the step when all are together
+ rest      together, less all of these: not attributed

That they add up shows nothing, since all but the last terms are differences of neighbours. The real check, which is shown, compares how
much longer a step together takes than one apart with the exchange and waiting that clocks within the step measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lockstep.explain import blocks
from lockstep.explain.evidence import Evidence
from lockstep.explain.finding import Finding
from lockstep.machine.cores import cores
from lockstep.machine.shared_memory import problem
from lockstep.measure import phases
from lockstep.statistics import MARGIN_RATIO, median_interval
from lockstep.units import duration, percent
from lockstep.ways import Way

CAUSES = {
    "batch": "each rank's batch is smaller, and small batches are less efficient",
    "wrapper": "the strategy's own work",
    "contention": "ranks at work at the same time slow each other down (caches, memory, clock)",
    "exchange": "the exchange of gradients",
    "waiting": "waiting for the slowest rank",
}
# A smaller share of a step stands for nothing that anybody would act on: the margin of every comparison of times.
LEAST, WORTH = MARGIN_RATIO, 0.05


def answer(evidence: Evidence) -> Iterator[Finding]:
    if evidence.spec.plan.ranks == 1:
        return
    ways = evidence.ways
    if "together" in ways and "whole" in ways:
        yield _measured(evidence, ways)
    elif evidence.step:
        yield _from_run(evidence)


def rounds(ways: dict[str, Way]) -> dict[str, list[float]]:
    """Seconds of a step by cause in each round, so that the machine's speed of that moment cancels in a difference."""
    whole, plain, apart, together = (ways[name] for name in ("whole", "plain", "apart", "together"))
    wrapped = ways.get("wrapped", plain)
    ideal = [seconds / together.ranks for seconds in whole.by_round]
    # Records of an earlier version have exchange and waiting as means over all rounds.
    means = {name: statistics.fmean(one[name] for one in together.phases) for name in ("exchange", "waiting")}
    found = {
        "ideal": ideal,
        "batch": [p - i for p, i in zip(plain.by_round, ideal, strict=True)],
        "wrapper": wrapped.beyond(plain),
        "contention": apart.beyond(wrapped),
        "exchange": together.exchange or [means["exchange"]] * len(ideal),
        "waiting": together.waiting or [means["waiting"]] * len(ideal),
    }
    named = zip(*found.values(), strict=True)
    return {**found, "rest": [t - sum(parts) for t, parts in zip(together.by_round, named, strict=True)]}


def losses(ways: dict[str, Way]) -> dict[str, float]:
    """The median over rounds of each cause; with `ideal` and `rest` they add up to the step of all ranks together."""
    found = {name: statistics.median(seconds) for name, seconds in rounds(ways).items() if name != "rest"}
    return {**found, "rest": ways["together"].seconds - sum(found.values())}


Ends = tuple[float, float] | None
"""A 95 % interval; None where it is not known."""


def intervals(ways: dict[str, Way]) -> dict[str, Ends]:
    """The interval of each part of `losses`, over rounds."""
    found: dict[str, Ends] = {name: _between(seconds) for name, seconds in rounds(ways).items()}
    if not ways["together"].exchange:
        found |= {"exchange": None, "waiting": None}
    if ends := found["rest"]:
        # The rest is what the medians of the others leave, which is not quite the median of what they leave in each round.
        rest = losses(ways)["rest"]
        found["rest"] = min(ends[0], rest), max(ends[1], rest)
    return found


def largest(by_round: dict[str, list[float]], causes: Sequence[str], least: float) -> list[str]:
    """The largest cause, and those that cannot be distinguished from it; none if even the largest may be less than `least` seconds."""
    ordered = sorted(causes, key=lambda cause: -statistics.median(by_round[cause]))
    first = by_round[ordered[0]]
    if not _above(first, least):
        return []
    differences = {cause: [a - b for a, b in zip(first, by_round[cause], strict=True)] for cause in ordered[1:]}
    return [ordered[0], *(cause for cause, values in differences.items() if not _above(values, 0.0))]


def _above(values: Sequence[float], least: float) -> bool:
    ends = _between(values)
    return ends is not None and ends[0] > least


def _between(values: Sequence[float]) -> Ends:
    """The 95 % interval of the median; a single round has none."""
    found = median_interval(values)
    return (found.low, found.high) if found else None


def _measured(evidence: Evidence, ways: dict[str, Way]) -> Finding:
    together, whole = ways["together"], ways["whole"]
    by_round, parts, ends = rounds(ways), losses(ways), intervals(ways)
    step, ranks, n = together.seconds, together.ranks, len(together.rounds)
    speeds = [w / t for w, t in zip(whole.by_round, together.by_round, strict=True)]
    lost = [t - ideal for t, ideal in zip(together.by_round, by_round["ideal"], strict=True)]
    # A slow rank has its own analyzer (straggler), and so have too many threads (limits), which inflate all but the exchange.
    elsewhere = {"waiting"} | ({"batch", "wrapper", "contention"} if crowded(evidence) else set())
    first = largest(by_round, [cause for cause in CAUSES if cause not in elsewhere], LEAST * step)
    beyond = together.beyond(ways["apart"])
    figures: dict[str, Any] = {
        "speed_up": statistics.median(speeds),
        "speed_up_interval": _listed(_between(speeds)),
        "rounds": sorted(speeds),
        "step_s": step,
        "parts_s": parts,
        "intervals_s": {name: _listed(each) for name, each in ends.items()},
        "largest": first,
        "beyond_apart_s": statistics.median(beyond),
        "run_step_s": evidence.step.get("total"),
    }
    split = ", ".join(
        [*(f"{name} {_with(parts[name], ends[name])}" for name in ("ideal", *CAUSES)), _rest(parts, ends)]
    )
    why = (
        f"a step takes {duration(step)}: {split} (median and 95 % interval of n = {n} rounds of one start); together it takes "
        f"{_with(figures['beyond_apart_s'], _between(beyond))} longer than apart, and clocks within the step say "
        f"{duration(parts['exchange'] + parts['waiting'])} for exchange and waiting"
    )
    speed = f"{ranks} ranks are {_times(speeds)} times as fast as one"
    if (loss := _between(lost)) and loss[1] <= LEAST * step:
        return Finding(verdict=f"{speed}: nothing is lost", why=why, figures=figures)
    lose = f"{speed}, not {ranks} times"
    if not first:
        most = largest(by_round, list(CAUSES), LEAST * step)
        told = (
            f"the largest loss is {_or(most, parts, ends)}, see {_under([cause for cause in most if cause in elsewhere])}"
            if most
            else "nothing stands out"
        )
        verdict = f"{lose}: {told} ({_with(statistics.median(lost), loss)} of {duration(step)} a step are lost)"
        return Finding(verdict=verdict, why=why, figures=figures)
    more = [name for name in CAUSES if name in elsewhere and parts[name] > parts[first[0]]]
    besides = f"besides {' and '.join(more)} (see {_under(more)}) " if more else ""
    apart = "" if len(first) == 1 else f", which {n} rounds cannot tell apart"
    return Finding(
        verdict=f"{lose}: {besides}the largest loss is {_or(first, parts, ends)}{apart}, "
        f"of {duration(statistics.median(lost))} a step",
        why=f"{why}; {'; '.join(f'{cause}: {CAUSES[cause]}' for cause in first)}",
        next=_advice(first[0], evidence)
        if len(first) == 1
        else f"measure longer: lockstep explain {evidence.run.id} --measure --seconds 60",
        cost=parts[first[0]] / step,
        interval=_share(ends[first[0]], step),
        cause=first[0],
        figures=figures,
    )


def _or(causes: Sequence[str], parts: dict[str, float], ends: dict[str, Ends]) -> str:
    return " or ".join(f"{cause} {_with(parts[cause], ends[cause])}" for cause in causes)


def _under(causes: Sequence[str]) -> str:
    """Which analyzers say more about them."""
    return " and ".join({"straggler" if cause == "waiting" else "limits": None for cause in causes})


def _share(ends: Ends, step: float) -> Ends:
    return (ends[0] / step, ends[1] / step) if ends else None


def _listed(ends: Ends) -> list[float] | None:
    return list(ends) if ends else None


def _times(speeds: Sequence[float]) -> str:
    ends = _between(speeds)
    return f"{statistics.median(speeds):.2f}" + (f" ({ends[0]:.2f} to {ends[1]:.2f})" if ends else "")


def _with(seconds: float, ends: Ends) -> str:
    return duration(seconds) + (f" ({duration(ends[0])} to {duration(ends[1])})" if ends else "")


def _rest(parts: dict[str, float], ends: dict[str, Ends]) -> str:
    """What no cause accounts for. Less than nothing is no saving: causes that were measured apart overlap."""
    if parts["rest"] >= 0:
        return f"rest {_with(parts['rest'], ends['rest'])}"
    return f"less {duration(-parts['rest'])} that two of these count twice"


def _from_run(evidence: Evidence) -> Finding:
    """Without `--measure` only what the run itself has timed is known."""
    step, exchange, waiting = (evidence.step[name] for name in ("total", "exchange", "waiting"))
    waited = np.mean(phases.waiting(evidence.ranks), axis=0)
    exchanged = np.mean([rows["exchange_ns"] for rows in evidence.ranks], axis=0) / 1e9 - waited
    timed = blocks.mean(exchanged)
    ends = {"exchange": timed.ends, "waiting": blocks.mean(waited).ends}
    # Of a foreign script nobody knows what the least is that it could take: it has to be worth a word.
    least = WORTH if evidence.spec.options.attached is not None else LEAST
    surely = timed.low > LEAST * step and timed.value > least * step
    return Finding(
        verdict=f"{percent(exchange / step)} of a step is exposed exchange, {percent(waiting / step)} waiting; "
        "what else is lost has not been measured",
        why=f"exchange {_with(exchange, ends['exchange'])}, waiting {_with(waiting, ends['waiting'])} of {duration(step)}, timed within "
        f"the run's own steps (mean and 95 % interval over blocks of them); {phases.waited_for(evidence.ranks)}",
        next=f"lockstep explain {evidence.run.id} --measure"
        if not evidence.spec.options.own_loop
        else "exchange less often, or over a faster backend",
        cost=exchange / step if surely else 0.0,
        interval=_share(timed.ends, step) if surely else None,
        cause="exchange" if surely else "",
        figures={
            "step_s": step,
            "parts_s": {"exchange": exchange, "waiting": waiting},
            "intervals_s": {name: _listed(each) for name, each in ends.items()},
        },
    )


def crowded(evidence: Evidence) -> bool:
    """Whether a host has more threads to run than cores."""
    placement = evidence.spec.placement
    local = placement.ranks if placement.emulated else placement.ranks // placement.hosts
    return placement.device == "cpu" and local * (placement.threads or 1) > known_cores(evidence)


def known_cores(evidence: Evidence) -> int:
    """The number of cores that the run could use."""
    return int(evidence.run.environment().get("cores_machine") or cores())


def _advice(first: str, evidence: Evidence) -> str:
    placement, plan = evidence.spec.placement, evidence.spec.plan
    if first == "batch":
        return f"give each rank more to do, global_batch={2 * plan.global_batch} with lr_rule=linear or sqrt"
    if first == "wrapper":
        return (
            "strategy=flat does less of its own for a small model"
            if placement.strategy == "ddp"
            else "train a larger batch a step, so that it weighs less"
        )
    if first == "contention":
        return "memory or caches are shared: compare fewer ranks with more threads each (lockstep study run workers), or use another host"
    more = []
    if placement.backend == "gloo" and placement.hosts == 1 and placement.ddp.hook != "powersgd" and not problem():
        more.append("backend=shm, which sends through memory instead of a socket")
    if plan.accumulation == 1:
        more.append("a larger global batch, so that there are fewer exchanges")
    if placement.strategy == "ddp" and placement.ddp.hook == "none":
        more.append("ddp.hook=bf16 (half the bytes, changes the mathematics)")
    more.append("strategy=local-sgd (changes the mathematics)")
    return "; or ".join(more)
