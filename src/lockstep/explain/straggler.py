"""Is a rank slow? Ranks are compared by the time that they work in a step; all of them wait for the longest.

Steps are noisy, and those of one host are slow together. So it is blocks of steps that are compared, each with the faster half of the ranks in
the same block, and a rank is slow if the interval over blocks says so. A host of which every rank seems slow is judged as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from lockstep.explain import blocks, slowness
from lockstep.explain.evidence import Evidence
from lockstep.explain.finding import Finding
from lockstep.measure.phases import computing, waited_for
from lockstep.statistics import ALPHA, MARGIN_RATIO, t_quantile
from lockstep.units import duration, percent

# Ranks are slow if they work this much longer than the faster half, and surely longer.
SLOWER = 1.05
# Neighbouring steps are slow together; blocks of 20 hardly are. A short run has blocks of fewer steps, and at least this many.
BLOCK_STEPS, FEWEST_BLOCKS = 20, 10
# Ranks of which now one and now another is late: on a machine with nothing else to do that costs up to 5.5 % of a step (n = 7). Where they had
# no processor meanwhile, less is worth reporting.
IN_TURNS, WORTH = 0.08, 0.05
# In a temporary slow-down, blocks take this much longer.
BLOCK_SLOWER = 1.2
# Of the blocks this share is cut off at each end: those in which something else ran.
CUT = 0.2


def answer(evidence: Evidence) -> Iterator[Finding]:
    ranks = len(evidence.ranks)
    if ranks == 1 or not len(evidence.ranks[0]):
        return
    work = computing(evidence.ranks)
    step = evidence.step["total"]
    means = work.mean(axis=1)
    lost = float((work.max(axis=0) - work.mean(axis=0)).mean())
    behind = relative(work)
    slow = slow_ranks(behind, evidence.spec.placement.hosts)
    slowest = int(means.argmax())
    excess = estimate(behind[slow or [slowest]].mean(axis=0))
    figures: dict[str, Any] = {
        "work_s": means.tolist(),
        "slowest": slowest,
        "slow": slow,
        "ratio": excess.ratio,
        "ratio_interval": [excess.low, excess.high] if math.isfinite(excess.high) else None,
        "last_in": float(np.isin(work.argmax(axis=0), slow).mean()),
        "lost_s": lost,
        "step_s": step,
    }
    if slow and evidence.spec.plan.shares:
        yield _uneven(evidence, figures, work)
    elif slow:
        yield _slow(evidence, figures, work)
    elif stretch := _stretch(work):
        yield _for_a_while(evidence, stretch, work, step, figures)
    elif (busy := slowness.neighbour(evidence, step).of(step)).value >= WORTH:
        yield _neighbour(busy, step, figures)
    else:
        verdict, advice = "no rank is slow", ""
        late = blocks.mean(work.max(axis=0) - work.mean(axis=0)).of(step)
        if in_turns := late.value >= IN_TURNS and late.low > MARGIN_RATIO:
            verdict += ", but they take turns in being late"
            advice = "something else runs on these cores now and then: keep the machine free, or exchange less often"
        differ = percent(float(means.max() / means.min()) - 1)
        waiting = f"waiting in turns costs {duration(lost)} ({percent(lost / step)}) of a step"
        why = f"the ranks' mean work in a step differs by {differ}; {waiting}, and {waited_for(evidence.ranks)}"
        yield Finding(
            verdict=verdict,
            why=why,
            next=advice,
            cost=late.value if in_turns else 0.0,
            interval=late.ends if in_turns else None,
            cause="turns" if in_turns else "",
            figures=figures,
        )


def _neighbour(busy: blocks.Mean, step: float, figures: dict[str, Any]) -> Finding:
    return Finding(
        verdict=f"something else runs on the ranks' cores: they lose {duration(busy.low * step)} to {duration(busy.high * step)} a step by it",
        why="for so long they could run and had no processor, which Linux counts: at least what one rank lost, at most what all lost; "
        "no rank is slow all the time",
        next="find it with 'top', and keep the cores of the ranks free",
        cost=busy.value,
        cause="neighbour" if busy.surely else "",
        figures=figures,
    )


class Excess(NamedTuple):
    """How many times as long as the others, with its interval."""

    ratio: float
    low: float
    high: float


def relative(work: Any) -> Any:
    """For each rank (row) and block of steps (column), the log of its work over that of the faster half of the ranks in this block."""
    ranks, steps = work.shape
    length = max(1, min(BLOCK_STEPS, steps // FEWEST_BLOCKS))
    count = steps // length
    blocks = np.sort(work[:, : count * length].reshape(ranks, count, length), axis=2)
    cut = length // 4
    logs = np.log(np.maximum(blocks[:, :, cut : length - cut].mean(axis=2), 1e-12))
    faster = np.argsort(np.median(logs, axis=1))[: (ranks + 1) // 2]
    return logs - np.median(logs[faster], axis=0)


def estimate(logs: Any, family: int = 1) -> Excess:
    """The trimmed mean over blocks, with Student's t on the winsorized variance (Tukey and McLaughlin), at 95 % for the whole family."""
    ordered = np.sort(logs)
    count, cut = len(ordered), int(CUT * len(ordered))
    kept = count - 2 * cut
    middle = float(ordered[cut : count - cut].mean())
    if kept < 2:
        return Excess(math.exp(middle), 0.0, math.inf)
    spread = np.clip(ordered, ordered[cut], ordered[count - cut - 1])
    error = math.sqrt(float(((spread - spread.mean()) ** 2).sum()) / (kept * (kept - 1)))
    half = t_quantile(ALPHA / family, kept - 1) * error
    return Excess(math.exp(middle), math.exp(middle - half), math.exp(middle + half))


def slow_ranks(behind: Any, hosts: int) -> list[int]:
    ranks = len(behind)
    found = [estimate(logs, ranks) for logs in behind]
    seem = [rank for rank in range(ranks) if found[rank].ratio >= SLOWER]
    slow: set[int] = {rank for rank in seem if found[rank].low > 1}
    for host in np.split(np.arange(ranks), hosts) if ranks % hosts == 0 else []:
        # All ranks of a host together say more than each alone.
        if set(host) <= set(seem) and estimate(behind[host].mean(axis=0), hosts).low > 1:
            slow |= set(host.tolist())
    return sorted(slow)


def _uneven(evidence: Evidence, figures: dict[str, Any], work: Any) -> Finding:
    """With unequal shares nobody is slow or fast by itself: the shares fit the ranks, or they do not."""
    slow: list[int] = figures["slow"]
    samples = [int(rank["samples"].sum()) for rank in evidence.ranks]
    each = [percent(count / sum(samples)) for count in samples]
    waits = float((work.max(axis=0) - np.delete(work, slow, axis=0).mean(axis=0)).mean())
    advice = "shares=auto finds the shares with which all are done at the same time"
    if evidence.spec.placement.shares == "auto":
        advice = "the ranks' speeds changed more often than shares=auto looks, or a batch has too few samples to divide better"
    return Finding(
        verdict=f"the shares do not fit the ranks: {_where(evidence, slow)} last, and the others wait {duration(waits)} a step",
        why=f"{'it has' if len(slow) == 1 else 'they have'} {', '.join(each[rank] for rank in slow[:4])} of the samples and {_times(figures)} times "
        f"the work of the others in a step",
        next=advice,
        cost=figures["lost_s"] / figures["step_s"],
        cause="shares" if blocks.mean(work.max(axis=0) - work.mean(axis=0)).of(figures["step_s"]).surely else "",
        figures=figures,
    )


def _slow(evidence: Evidence, figures: dict[str, Any], work: Any) -> Finding:
    slow: list[int] = figures["slow"]
    others = [rank for rank in range(len(work)) if rank not in slow]
    waits = float((work.max(axis=0) - work[others].mean(axis=0)).mean())
    stretch = _stretch(work)
    since = f", in steps {stretch[1]:,} to {stretch[2]:,}" if stretch and slow == [stretch[0]] else ""
    one = len(slow) == 1
    placement = evidence.spec.placement
    kind = "host" if placement.hosts > 1 and whole_hosts(slow, placement.ranks, placement.hosts) else "rank"
    found = slowness.cost(work, slow).of(figures["step_s"])
    reason = slowness.reason(evidence, slow, kind)
    return Finding(
        verdict=f"{_where(evidence, slow)} slow: the others wait {duration(waits)} a step for {'it' if one else 'them'}",
        why=f"{'it works' if one else 'they work'} {duration(float(work[slow].mean()))} in a step, {_times(figures)} times as long as the others, and "
        f"{'is' if one else 'one of them is'} last in {percent(figures['last_in'])} of the steps{since}{f'; {reason.text}' if reason.text else ''}",
        next=reason.advice
        or f"see what else runs there, whether it is throttled, and whether the host differs ('lockstep doctor' there){_less(evidence)}",
        cost=found.value,
        interval=found.ends,
        cause=reason.cause if found.surely else "",
        figures=figures,
    )


def _less(evidence: Evidence) -> str:
    """What helps where a slow rank cannot be helped."""
    placement = evidence.spec.placement
    fits = placement.strategy in ("ddp", "flat", "naive") and placement.shares is None
    return "; if it stays slow: shares=auto gives it less of each batch" if fits else ""


def _where(evidence: Evidence, slow: list[int]) -> str:
    """Whole hosts where all of their ranks are slow, else ranks."""
    placement = evidence.spec.placement
    size = placement.ranks // placement.hosts
    whole = whole_hosts(slow, placement.ranks, placement.hosts)
    if size > 1 and whole:
        return f"{_listed('host', whole)} (all of {'its' if len(whole) == 1 else 'their'} ranks) {'is' if len(whole) == 1 else 'are'}"
    where = f" on host {slow[0] // size}" if placement.hosts > 1 and len(slow) == 1 else ""
    return f"{_listed('rank', slow)}{where} {'is' if len(slow) == 1 else 'are'}"


def whole_hosts(slow: list[int], ranks: int, hosts: int) -> list[int]:
    """The hosts whose ranks these are; none where they are not all ranks of some hosts."""
    size = ranks // hosts
    whole = [host for host in range(hosts) if set(range(host * size, (host + 1) * size)) <= set(slow)]
    return whole if len(whole) * size == len(slow) else []


def _times(figures: dict[str, Any]) -> str:
    low, high = figures["ratio_interval"]
    return f"{figures['ratio']:.2f} ({low:.2f} to {high:.2f})"


def _listed(noun: str, numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}"
    shown = [str(number) for number in numbers[:8]] + (["…"] if len(numbers) > 8 else [])
    return f"{noun}s {', '.join(shown[:-1])} and {shown[-1]}"


def _for_a_while(
    evidence: Evidence, stretch: tuple[int, int, int], work: Any, step: float, figures: dict[str, Any]
) -> Finding:
    slow, first, last = stretch
    part = work[:, first - 1 : last]
    lost = float((part.max(axis=0) - np.delete(part, slow, axis=0).max(axis=0)).sum()) / work.shape[1]
    others = float(np.median(np.delete(part.mean(axis=1), slow)))
    return Finding(
        verdict=f"rank {slow} was slow for a while: steps {first:,} to {last:,}",
        why=f"it worked {float(part[slow].mean()) / others:.2f} times as long as the others then, which costs {percent(lost / step)} of the whole run",
        next="something else ran on its core at that time: run it again, or keep the machine free",
        cost=lost / step,
        cause="pause" if lost / step > MARGIN_RATIO else "",
        figures={**figures, "stretch": list(stretch)},
    )


def _stretch(work: Any) -> tuple[int, int, int] | None:
    """The longest sequence of blocks in which one rank is much slower than the others: rank, first and last step (from 1)."""
    ranks, steps = work.shape
    blocks = steps // BLOCK_STEPS
    if blocks < 3:
        return None
    medians = np.median(work[:, : blocks * BLOCK_STEPS].reshape(ranks, blocks, BLOCK_STEPS), axis=2)
    best: tuple[int, int, int] | None = None
    for rank in range(ranks):
        slow = medians[rank] > BLOCK_SLOWER * np.median(np.delete(medians, rank, axis=0), axis=0)
        end = 0
        for is_slow, same in groupby(slow):
            begin, end = end, end + len(list(same))
            first, last = begin * BLOCK_STEPS + 1, end * BLOCK_STEPS
            if is_slow and 2 <= end - begin < blocks and (best is None or last - first > best[2] - best[1]):
                best = (rank, first, last)
    return best
