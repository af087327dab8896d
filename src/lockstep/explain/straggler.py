"""Is a rank slow? Ranks are compared by the time that they work in a step; all of them wait for the longest."""

from __future__ import annotations

from typing import Any

import numpy as np

from lockstep.explain.evidence import Evidence
from lockstep.explain.finding import Finding
from lockstep.explain.step import computing
from lockstep.explain.words import ms, percent

# A rank is slow if it works this much longer than the middle of the others, and is the last one in most steps.
SLOWER, LAST_IN = 1.05, 0.6
# Stretches of a run are looked at in blocks, since single steps jump.
BLOCK_STEPS, BLOCK_SLOWER = 20, 1.2


def answer(evidence: Evidence) -> list[Finding]:
    ranks = len(evidence.ranks)
    if ranks == 1 or not len(evidence.ranks[0]):
        return []
    work = computing(evidence.ranks)
    step = float(np.mean([rows["total_ns"].mean() for rows in evidence.ranks])) / 1e9
    means = work.mean(axis=1)
    # What the mean rank waits, and the part of it that is always for the same one.
    lost = float((work.max(axis=0) - work.mean(axis=0)).mean())
    lasting = float(means.max() - means.mean())
    slow = int(means.argmax())
    others = float(np.median(np.delete(means, slow)))
    last = float((work.argmax(axis=0) == slow).mean())
    figures: dict[str, Any] = {
        "work_s": means.tolist(),
        "slowest": slow,
        "ratio": float(means[slow]) / others,
        "last_in": last,
        "lost_s": lost,
        "lasting_s": lasting,
        "step_s": step,
    }
    if means[slow] / others >= SLOWER and last >= LAST_IN:
        return [_slow(evidence, slow, figures, work)]
    stretch = _stretch(work)
    if stretch:
        return [_for_a_while(evidence, stretch, work, step, figures)]
    verdict = "no rank is slow" if lost < 0.05 * step else "no rank is slow, but they take turns in being late"
    return [
        Finding(
            question="straggler",
            verdict=verdict,
            why=f"the ranks' mean work in a step differs by {percent(float(means.max() / means.min()) - 1)}; waiting in turns costs {ms(lost)} ({percent(lost / step)}) of a step",
            next=""
            if lost < 0.05 * step
            else "something else runs on these cores now and then: keep the machine free, or exchange less often",
            cost=lost / step,
            figures=figures,
        )
    ]


def _slow(evidence: Evidence, slow: int, figures: dict[str, Any], work: Any) -> Finding:
    placement = evidence.spec.placement
    per_host = placement.ranks // placement.hosts
    host, step = slow // per_host, figures["step_s"]
    means = np.array(figures["work_s"])
    where = f"rank {slow}"
    if placement.hosts > 1:
        own = means[host * per_host : (host + 1) * per_host]
        others = np.delete(means, slice(host * per_host, (host + 1) * per_host))
        where = (
            f"host {host} (all of its ranks)"
            if per_host > 1 and own.min() > SLOWER * others.max()
            else f"rank {slow} on host {host}"
        )
    stretch = _stretch(work)
    since = f", in steps {stretch[1]:,} to {stretch[2]:,}" if stretch and stretch[0] == slow else ""
    return Finding(
        question="straggler",
        verdict=f"{where} is slow: the others wait {ms(figures['lasting_s'] * len(means) / (len(means) - 1))} a step for it",
        why=f"it works {ms(means[slow])} in a step, {figures['ratio']:.2f} times as long as the others, and is last in {percent(figures['last_in'])} of the steps{since}",
        next="see what else runs on its core, whether it is throttled, and whether its host differs ('lockstep doctor' there)",
        cost=figures["lost_s"] / step,
        figures=figures,
    )


def _for_a_while(
    evidence: Evidence, stretch: tuple[int, int, int], work: Any, step: float, figures: dict[str, Any]
) -> Finding:
    slow, first, last = stretch
    part = work[:, first - 1 : last]
    lost = float((part.max(axis=0) - part.mean(axis=0)).sum()) / work.shape[1]
    others = float(np.median(np.delete(part.mean(axis=1), slow)))
    return Finding(
        question="straggler",
        verdict=f"rank {slow} was slow for a while: steps {first:,} to {last:,}",
        why=f"it worked {float(part[slow].mean()) / others:.2f} times as long as the others then, which costs {percent(lost / step)} of the whole run",
        next="something else ran on its core at that time: run it again, or keep the machine free",
        cost=lost / step,
        figures={**figures, "stretch": list(stretch)},
    )


def _stretch(work: Any) -> tuple[int, int, int] | None:
    """The longest stretch of blocks in which one rank is much slower than the others: rank, first and last step (from 1)."""
    ranks, steps = work.shape
    blocks = steps // BLOCK_STEPS
    if blocks < 3:
        return None
    middle = np.median(work[:, : blocks * BLOCK_STEPS].reshape(ranks, blocks, BLOCK_STEPS), axis=2)
    best: tuple[int, int, int] | None = None
    for rank in range(ranks):
        slow = middle[rank] > BLOCK_SLOWER * np.median(np.delete(middle, rank, axis=0), axis=0)
        begin = None
        for block, is_slow in enumerate([*slow, False]):
            if is_slow and begin is None:
                begin = block
            elif not is_slow and begin is not None:
                length = block - begin
                if length >= 2 and length < blocks and (best is None or length * BLOCK_STEPS > best[2] - best[1] + 1):
                    best = (rank, begin * BLOCK_STEPS + 1, block * BLOCK_STEPS)
                begin = None
    return best
