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

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from lockstep.explain.evidence import Evidence
from lockstep.explain.finding import Finding
from lockstep.machine.cores import cores
from lockstep.statistics import median_interval
from lockstep.units import duration, percent
from lockstep.ways import Way

CAUSES = {
    "batch": "each rank's batch is smaller, and small batches are less efficient",
    "wrapper": "the strategy's own work",
    "contention": "ranks at work at the same time slow each other down (caches, memory, clock)",
    "exchange": "the exchange of gradients",
    "waiting": "waiting for the slowest rank",
}


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
    means = {name: statistics.fmean(phases[name] for phases in together.phases) for name in ("exchange", "waiting")}
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


def largest(by_round: dict[str, list[float]], causes: Sequence[str]) -> list[str]:
    """The largest cause, and those that cannot be distinguished from it; none if even the largest cannot be distinguished from zero."""
    ordered = sorted(causes, key=lambda cause: -statistics.median(by_round[cause]))
    first = by_round[ordered[0]]
    if _between(first)[0] <= 0:
        return []
    alike = [
        cause for cause in ordered[1:] if _between([a - b for a, b in zip(first, by_round[cause], strict=True)])[0] <= 0
    ]
    return [ordered[0], *alike]


def _between(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median; a single round has none."""
    found = median_interval(values)
    return (found.low, found.high) if found else (-math.inf, math.inf)


def _measured(evidence: Evidence, ways: dict[str, Way]) -> Finding:
    together, whole = ways["together"], ways["whole"]
    by_round, parts = rounds(ways), losses(ways)
    step, ranks, n = together.seconds, together.ranks, len(together.rounds)
    speeds = [w / t for w, t in zip(whole.by_round, together.by_round, strict=True)]
    speed_up, (slow, fast) = statistics.median(speeds), _between(speeds)
    loss = step - parts["ideal"]
    # A slow rank has its own analyzer (straggler), and so have too many threads (limits), which inflate all but the exchange.
    left_out = {"waiting"} | ({"batch", "wrapper", "contention"} if crowded(evidence) else set())
    first = largest(by_round, [cause for cause in CAUSES if cause not in left_out])
    intervals = {name: _between(seconds) for name, seconds in by_round.items()}
    beyond = together.beyond(ways["apart"])
    figures: dict[str, Any] = {
        "speed_up": speed_up,
        "speed_up_interval": [slow, fast],
        "rounds": sorted(speeds),
        "step_s": step,
        "parts_s": parts,
        "intervals_s": {name: list(ends) for name, ends in intervals.items()},
        "largest": first,
        "beyond_apart_s": statistics.median(beyond),
        "run_step_s": evidence.step.get("total"),
    }
    split_text = ", ".join(f"{name} {_with(parts[name], intervals[name])}" for name in ("ideal", *CAUSES, "rest"))
    low, high = _between(beyond)
    texts = (
        f"a step takes {duration(step)}: {split_text} (median and 95 % interval of n = {n} rounds of one start); together it takes "
        f"{_with(figures['beyond_apart_s'], (low, high))} longer than apart, and clocks within the step say {duration(parts['exchange'] + parts['waiting'])} "
        "for exchange and waiting"
    )
    speed = f"{ranks} ranks are {speed_up:.2f} ({slow:.2f} to {fast:.2f}) times as fast as one"
    if loss <= 0.02 * step:
        return Finding(verdict=f"{speed}: nothing is lost", why=texts, figures=figures)
    if not first:
        verdict = (
            f"{speed}, not {ranks} times: {duration(loss)} a step are lost, to no cause that can be told from noise"
        )
        return Finding(verdict=verdict, why=texts, figures=figures)
    if len(first) == 1:
        blame = (
            f"the largest loss is {first[0]} ({_with(parts[first[0]], intervals[first[0]])} of {duration(loss)} a step)"
        )
    else:
        blame = f"the largest losses are {', '.join(first[:-1])} and {first[-1]}, which {n} rounds cannot tell apart"
    return Finding(
        verdict=f"{speed}, not {ranks} times: {blame}",
        why=f"{texts}; {'; '.join(f'{cause}: {CAUSES[cause]}' for cause in first)}",
        next=_advice(first[0], evidence, ways)
        if len(first) == 1
        else f"measure longer: lockstep explain {evidence.run.id} --measure --seconds 60",
        cost=max(0.0, parts[first[0]] / step),
        figures=figures,
    )


def _with(seconds: float, ends: tuple[float, float]) -> str:
    return f"{duration(seconds)} ({duration(ends[0])} to {duration(ends[1])})"


def _from_run(evidence: Evidence) -> Finding:
    """Without `--measure` only what the run itself has timed is known."""
    step, exchange, waiting = (evidence.step[name] for name in ("total", "exchange", "waiting"))
    return Finding(
        verdict=f"{percent(exchange / step)} of a step is exposed exchange, {percent(waiting / step)} waiting; "
        "what else is lost has not been measured",
        why=f"exchange {duration(exchange)}, waiting {duration(waiting)} of {duration(step)}, timed within the run's own steps",
        next=f"lockstep explain {evidence.run.id} --measure"
        if evidence.spec.options.script is None
        else "exchange less often, or over a faster backend",
        cost=exchange / step,
        figures={"step_s": step, "parts_s": {"exchange": exchange, "waiting": waiting}},
    )


def crowded(evidence: Evidence) -> bool:
    """Whether a host has more threads to run than cores."""
    placement = evidence.spec.placement
    local = placement.ranks if placement.emulated else placement.ranks // placement.hosts
    return placement.device == "cpu" and local * (placement.threads or 1) > known_cores(evidence)


def known_cores(evidence: Evidence) -> int:
    """The number of cores that the run could use."""
    return int(evidence.run.environment().get("cores_machine") or cores())


def _advice(first: str, evidence: Evidence, ways: dict[str, Way]) -> str:
    placement, plan = evidence.spec.placement, evidence.spec.plan
    if first == "batch":
        double = ways.get("double")
        gain = (
            ""
            if double is None
            else f": at twice the batch a sample takes {percent(1 - double.seconds / (2 * ways['together'].seconds))} less"
        )
        return f"give each rank more to do, global_batch={2 * plan.global_batch} with lr_rule=linear or sqrt{gain}"
    if first == "wrapper":
        return (
            "strategy=flat does less of its own for a small model"
            if placement.strategy == "ddp"
            else "train a larger batch a step, so that it weighs less"
        )
    if first == "contention":
        return "memory or caches are shared: compare fewer ranks with more threads each (lockstep study run workers), or use another host"
    more = []
    if placement.backend == "gloo" and placement.hosts == 1:
        more.append("a faster backend (lockstep comms, then backend=auto)")
    if plan.accumulation == 1:
        more.append("a larger global batch, so that there are fewer exchanges")
    if placement.strategy == "ddp" and placement.ddp.hook == "none":
        more.append("ddp.hook=bf16 (half the bytes, changes the mathematics)")
    more.append("strategy=local-sgd (changes the mathematics)")
    return "; or ".join(more)
