"""Is a rank slow? Ranks are compared by the time that they work in a step; all of them wait for the longest."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import numpy as np

from lockstep.explain.evidence import Evidence
from lockstep.explain.finding import Finding
from lockstep.measure.phases import computing
from lockstep.units import duration, percent

# Ranks are slow if they work this much longer than the faster half, and one of them is the last in most steps.
SLOWER, LAST_IN = 1.05, 0.6
# A temporary slow-down is looked for in blocks of steps, since single steps are noisy.
BLOCK_STEPS, BLOCK_SLOWER = 20, 1.2


def answer(evidence: Evidence) -> Iterator[Finding]:
    ranks = len(evidence.ranks)
    if ranks == 1 or not len(evidence.ranks[0]):
        return
    work = computing(evidence.ranks)
    step = evidence.step["total"]
    means = work.mean(axis=1)
    lost = float((work.max(axis=0) - work.mean(axis=0)).mean())
    # The faster half is the reference: on a slow host several ranks are slow, and take turns at being last.
    usual = float(np.median(np.sort(means)[: (ranks + 1) // 2]))
    slow = [rank for rank in range(ranks) if means[rank] >= SLOWER * usual]
    last = float(np.isin(work.argmax(axis=0), slow).mean())
    figures: dict[str, Any] = {
        "work_s": means.tolist(),
        "slowest": int(means.argmax()),
        "slow": slow,
        "ratio": float(means[slow or [int(means.argmax())]].mean()) / usual,
        "last_in": last,
        "lost_s": lost,
        "step_s": step,
    }
    if slow and last >= LAST_IN:
        yield _slow(evidence, figures, work)
    elif stretch := _stretch(work):
        yield _for_a_while(evidence, stretch, work, step, figures)
    else:
        verdict, advice = "no rank is slow", ""
        if lost >= 0.05 * step:
            verdict += ", but they take turns in being late"
            advice = "something else runs on these cores now and then: keep the machine free, or exchange less often"
        differ = percent(float(means.max() / means.min()) - 1)
        waiting = f"waiting in turns costs {duration(lost)} ({percent(lost / step)}) of a step"
        why = f"the ranks' mean work in a step differs by {differ}; {waiting}"
        yield Finding(verdict=verdict, why=why, next=advice, cost=lost / step, figures=figures)


def _slow(evidence: Evidence, figures: dict[str, Any], work: Any) -> Finding:
    slow: list[int] = figures["slow"]
    others = [rank for rank in range(len(work)) if rank not in slow]
    waits = float((work.max(axis=0) - work[others].mean(axis=0)).mean())
    stretch = _stretch(work)
    since = f", in steps {stretch[1]:,} to {stretch[2]:,}" if stretch and slow == [stretch[0]] else ""
    one = len(slow) == 1
    return Finding(
        verdict=f"{_where(evidence, slow)} slow: the others wait {duration(waits)} a step for {'it' if one else 'them'}",
        why=f"{'it works' if one else 'they work'} {duration(float(work[slow].mean()))} in a step, {figures['ratio']:.2f} times as long as the others, and "
        f"{'is' if one else 'one of them is'} last in {percent(figures['last_in'])} of the steps{since}",
        next=f"see what else runs there, whether it is throttled, and whether the host differs ('lockstep doctor' there){_less(evidence)}",
        cost=figures["lost_s"] / figures["step_s"],
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
    whole = [host for host in range(placement.hosts) if set(range(host * size, (host + 1) * size)) <= set(slow)]
    if size > 1 and len(whole) * size == len(slow):
        return f"{_listed('host', whole)} (all of {'its' if len(whole) == 1 else 'their'} ranks) {'is' if len(whole) == 1 else 'are'}"
    where = f" on host {slow[0] // size}" if placement.hosts > 1 and len(slow) == 1 else ""
    return f"{_listed('rank', slow)}{where} {'is' if len(slow) == 1 else 'are'}"


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
    lost = float((part.max(axis=0) - part.mean(axis=0)).sum()) / work.shape[1]
    others = float(np.median(np.delete(part.mean(axis=1), slow)))
    return Finding(
        verdict=f"rank {slow} was slow for a while: steps {first:,} to {last:,}",
        why=f"it worked {float(part[slow].mean()) / others:.2f} times as long as the others then, which costs {percent(lost / step)} of the whole run",
        next="something else ran on its core at that time: run it again, or keep the machine free",
        cost=lost / step,
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
