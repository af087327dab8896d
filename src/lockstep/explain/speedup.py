"""Why are N ranks not N times faster? Differences between ways to take a step, each of which adds one cause (docs/explain.md).

whole / N   one process with the whole batch, divided by N: what N times as fast would be
+ batch     a rank's smaller batch is less efficient:                  plain - whole / N
+ wrapper   what the strategy does even where it has nobody to talk to: wrapped - plain
+ contention  ranks share caches, memory and clock:                    apart - wrapped
+ exchange, waiting   as timed within the step when all are together
+ rest      together, less all of these: not attributed
"""

from __future__ import annotations

import statistics
from typing import Any

from lockstep.explain.evidence import Evidence
from lockstep.explain.finding import Finding
from lockstep.explain.step import split
from lockstep.explain.words import ms, percent
from lockstep.placement import cores
from lockstep.ways import Way

CAUSES = {
    "batch": "each rank's batch is smaller, and small batches are less efficient",
    "wrapper": "the strategy's own work",
    "contention": "ranks at work at the same time slow each other down (caches, memory, clock)",
    "exchange": "the exchange of gradients",
    "waiting": "waiting for the slowest rank",
}


def answer(evidence: Evidence) -> list[Finding]:
    ranks = evidence.spec.plan.ranks
    if ranks == 1:
        return []
    ways = evidence.ways
    return [_measured(evidence, ways)] if "together" in ways and "whole" in ways else _from_run(evidence)


def losses(ways: dict[str, Way]) -> dict[str, float]:
    """Seconds of a step by cause; with `ideal` and `rest` they add up to the step of all ranks together."""
    whole, plain, apart, together = (ways[name] for name in ("whole", "plain", "apart", "together"))
    wrapped = ways.get("wrapped", plain)
    found = {
        "ideal": whole.seconds / together.ranks,
        "batch": plain.seconds - whole.seconds / together.ranks,
        "wrapper": wrapped.seconds - plain.seconds,
        "contention": apart.seconds - wrapped.seconds,
        "exchange": statistics.fmean(phases["exchange"] for phases in together.phases),
        "waiting": statistics.fmean(phases["waiting"] for phases in together.phases),
    }
    return {**found, "rest": together.seconds - sum(found.values())}


def _measured(evidence: Evidence, ways: dict[str, Way]) -> Finding:
    together, whole = ways["together"], ways["whole"]
    parts = losses(ways)
    step, ranks = together.seconds, together.ranks
    speed_up = whole.seconds / step
    by_round = sorted(w / t for w, t in zip(whole.by_round, together.by_round, strict=True))
    loss = step - parts["ideal"]
    causes = {cause: parts[cause] for cause in CAUSES}
    # A slow rank has an analyzer of its own (straggler), and so have threads without a core (limits), which inflate all but the exchange.
    left_out = {"waiting"} | ({"batch", "wrapper", "contention"} if crowded(evidence) else set())
    own = {cause: seconds for cause, seconds in causes.items() if cause not in left_out}
    first = max(own, key=lambda cause: own[cause])
    figures: dict[str, Any] = {
        "speed_up": speed_up,
        "rounds": by_round,
        "step_s": step,
        "parts_s": parts,
        "run_step_s": _run_step(evidence),
        "explained": 1 - abs(parts["rest"]) / loss if loss > 0 else None,
    }
    split_text = ", ".join(f"{name} {ms(parts[name])}" for name in ("ideal", *CAUSES, "rest"))
    texts = f"a step takes {ms(step)}: {split_text} (n = {len(by_round)} rounds)"
    if loss <= 0.02 * step:
        return Finding(
            question="speed-up",
            verdict=f"{ranks} ranks are {speed_up:.2f} times as fast as one: nothing is lost",
            why=texts,
            figures=figures,
        )
    return Finding(
        question="speed-up",
        verdict=f"{ranks} ranks are {speed_up:.2f} times as fast as one, not {ranks} times: most is lost to "
        f"{first} ({ms(own[first])} of {ms(loss)} a step)",
        why=f"{texts}; {CAUSES[first]}",
        next=_advice(first, evidence, ways),
        cost=max(0.0, own[first] / step),
        figures=figures,
    )


def _from_run(evidence: Evidence) -> list[Finding]:
    """Without a probe only what the run itself has timed is known."""
    if not len(evidence.ranks[0]):
        return []
    parts = split(evidence.ranks)
    step = statistics.fmean(part["total"] for part in parts)
    exchange = statistics.fmean(part["exchange"] for part in parts)
    waiting = statistics.fmean(part["waiting"] for part in parts)
    return [
        Finding(
            question="speed-up",
            verdict=f"{percent(exchange / step)} of a step is exposed exchange, {percent(waiting / step)} waiting; "
            "what else is lost has not been measured",
            why=f"exchange {ms(exchange)}, waiting {ms(waiting)} of {ms(step)}, timed within the run's own steps",
            next=f"lockstep explain {evidence.run.id} --measure"
            if evidence.spec.options.script is None
            else "exchange less often, or over a faster backend",
            cost=exchange / step,
            figures={"step_s": step, "parts_s": {"exchange": exchange, "waiting": waiting}},
        )
    ]


def crowded(evidence: Evidence) -> bool:
    """Whether a host has more threads to run than cores."""
    placement = evidence.spec.placement
    local = placement.ranks if placement.emulated else placement.ranks // placement.hosts
    return placement.device == "cpu" and local * (placement.threads or 1) > known_cores(evidence)


def known_cores(evidence: Evidence) -> int:
    """The cores that the run had."""
    return int(evidence.run.environment().get("cores_machine") or cores())


def _run_step(evidence: Evidence) -> float | None:
    if not len(evidence.ranks[0]):
        return None
    return statistics.fmean(float(rows["total_ns"].mean()) for rows in evidence.ranks) / 1e9


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
