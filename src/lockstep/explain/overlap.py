"""How much of the exchange is hidden? Overlap is the time in which a rank computes while it communicates, divided by the time in which
it communicates.

From a trace (`lockstep run --trace 20`) it is measured, bucket by bucket. Without one DDP's own figures give it for the whole step, as a
upper bound: DDP counts from the start of the first bucket, whether or not a bucket was being exchanged all the time after it.
Strategies that exchange after backward hide nothing by design.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from lockstep import shapes
from lockstep.explain.evidence import Evidence
from lockstep.explain.finding import Finding
from lockstep.measure.traced import TracedStep, common, length, read, traced_steps, union
from lockstep.run import read_json
from lockstep.units import duration, percent, text

AFTER_BACKWARD = ("flat", "naive", "local-sgd", "diloco")
# A smaller exposed share needs no advice.
LITTLE = 0.03
# PyTorch's own first bucket. Smaller messages cost little less than this: their number counts, not their size.
SMALLEST_BUCKET = 1 << 20
# The advice divides an exchange with too few buckets into this many: the last one, which nothing can hide, is then a quarter of it.
DIVIDE_INTO = 4


class Seen(NamedTuple):
    """What is known of a run's exchange: seconds per step, as means over ranks and steps."""

    source: str
    overlap: float
    buckets: list[dict[str, Any]]
    """Bytes of each; with a trace also its time and overlap."""
    window: float | None = None
    """From the start of the first bucket to the end of computing: what there is to hide behind."""


def answer(evidence: Evidence) -> Iterator[Finding]:
    strategy = evidence.spec.placement.strategy
    if evidence.spec.plan.ranks == 1 or not len(evidence.ranks[0]):
        return
    seen = from_trace(evidence) or from_ddp(evidence)
    if strategy in AFTER_BACKWARD:
        seen = Seen("trace" if seen else "strategy", seen.overlap if seen else 0.0, [])
    if seen is None:
        return
    yield _finding(evidence, seen, _times(evidence))


def from_trace(evidence: Evidence) -> Seen | None:
    """Measured from the traced steps, over all ranks that have a trace."""
    contents = [read(evidence.run, rank) for rank in range(evidence.spec.plan.ranks)]
    steps = [step for content in contents if content for step in traced_steps(content).values()]
    steps = [step for step in steps if step.communicating]
    if not steps:
        return None
    shared = sum(length(common(step.communicating, step.computing)) for step in steps)
    whole = sum(length(step.communicating) for step in steps)
    windows = [_window(step) for step in steps if step.buckets]
    return Seen("trace", shared / whole, _buckets(steps), float(np.mean(windows)) / 1e6 if windows else None)


def _buckets(steps: list[TracedStep]) -> list[dict[str, Any]]:
    found = []
    for index in sorted({bucket.index for step in steps for bucket in step.buckets}):
        mine = [(step, bucket) for step in steps for bucket in step.buckets if bucket.index == index]
        whole = sum(bucket.end - bucket.begin for _, bucket in mine)
        shared = sum(length(common([(bucket.begin, bucket.end)], step.computing)) for step, bucket in mine)
        found.append(
            {
                "bucket": index,
                "bytes": mine[0][1].bytes,
                "seconds": whole / len(mine) / 1e6,
                "overlap": shared / whole if whole else 0.0,
            }
        )
    return found


def _window(step: TracedStep) -> float:
    begin = min(bucket.begin for bucket in step.buckets)
    backward = union(step.of("backward"))
    return max(0.0, backward[-1][1] - begin) if backward else 0.0


def from_ddp(evidence: Evidence) -> Seen | None:
    """DDP's own logging data, as every rank keeps it in its summary."""
    folders = [evidence.run.rank_folder(rank) for rank in range(evidence.spec.plan.ranks)]
    found = [
        ((read_json(folder / "summary.json", shapes.RankSummary) or {}).get("strategy") or {}) for folder in folders
    ]
    found = [figures for figures in found if figures.get("avg_backward_comm_time")]
    if not found:
        return None
    window = float(np.mean([figures.get("avg_backward_compute_comm_overlap_time") or 0.0 for figures in found]))
    whole = float(np.mean([figures["avg_backward_comm_time"] for figures in found]))
    sizes = found[0].get("rebuilt_bucket_sizes") or found[0].get("bucket_sizes") or []
    buckets = [{"bucket": index, "bytes": size} for index, size in enumerate(sizes)]
    return Seen("ddp", min(1.0, window / whole), buckets, window / 1e9)


def _times(evidence: Evidence) -> dict[str, float]:
    """Seconds of a step."""
    names = {"step_s": "total", "backward_s": "backward", "exposed_s": "exchange", "waiting_s": "waiting"}
    return {key: evidence.step[name] for key, name in names.items()}


def _finding(evidence: Evidence, seen: Seen, times: dict[str, float]) -> Finding:
    last = seen.buckets[-1]["bytes"] if seen.buckets else 0
    exposed = times["exposed_s"] / times["step_s"]
    most = "at most " if seen.source == "ddp" else ""
    return Finding(
        verdict=f"{most}{percent(seen.overlap)} of the exchange is hidden behind computing; {percent(exposed)} of a step is exchange that is not",
        why=_why(evidence, seen, times),
        next=_next(evidence, seen, exposed, last),
        figures={
            "source": seen.source,
            "overlap": seen.overlap,
            "buckets": seen.buckets,
            "window_s": seen.window,
            **times,
        },
    )


def _target(seen: Seen) -> int:
    whole: int = sum(bucket["bytes"] for bucket in seen.buckets)
    return max(SMALLEST_BUCKET, whole // DIVIDE_INTO)


def _why(evidence: Evidence, seen: Seen, times: dict[str, float]) -> str:
    spent = f"{duration(times['exposed_s'])} of {duration(times['step_s'])} a step"
    if not seen.buckets:
        return f"strategy={evidence.spec.placement.strategy} exchanges when backward is over: {spent}"
    sizes = [bucket["bytes"] for bucket in seen.buckets]
    if len(sizes) == 1:
        return (
            f"all gradients are in one bucket of {text(sizes[0], 'bytes')}, which is full only when the last gradient is there, and then "
            f"backward is over: nothing is left to hide behind; {spent}"
        )
    whole = sum(sizes)
    times_of = "".join(
        f"; bucket {bucket['bucket']} ({text(bucket['bytes'], 'bytes')}): {percent(bucket['overlap'])} of {duration(bucket['seconds'])}"
        for bucket in seen.buckets[:6]
        if "seconds" in bucket
    )
    window = seen.window or 0.0
    if window < times["exposed_s"]:
        reason = f"only {duration(window)} of backward are left when the first of {len(sizes)} buckets is full, and {duration(times['exposed_s'])} of exchange follow"
    else:
        reason = f"the last of {len(sizes)} buckets holds {percent(sizes[-1] / whole)} of {text(whole, 'bytes')}, and is full only when backward is over"
    return f"{reason}; {spent}{times_of}"


def _next(evidence: Evidence, seen: Seen, exposed: float, last: int) -> str:
    if exposed < LITTLE:
        return f"nothing to gain: the exchange that is not hidden is {percent(exposed)} of a step"
    if last > SMALLEST_BUCKET:
        return f"smaller buckets begin earlier: ddp.bucket_mb={_target(seen) / (1 << 20):.3g}"
    less = "a larger batch, or an exchange every few steps (strategy=local-sgd, which changes the mathematics)"
    if not seen.buckets and evidence.spec.placement.strategy in ("flat", "naive"):
        return (
            f"for gradients of several megabytes strategy=ddp, which exchanges during backward; for small ones {less}"
        )
    return f"a message of {text(last, 'bytes')} costs what a smaller one does, so dividing it hides nothing: a faster backend ('lockstep comms'), {less}"
