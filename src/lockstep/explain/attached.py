"""The usual suspects in a training that Lockstep only looks at (docs/attach.md): what its hooks have seen, with the time that it is about."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.explain.evidence import Evidence
from lockstep.explain.finding import Finding
from lockstep.placement import DEFAULT_BUCKET_MB
from lockstep.units import duration, percent

# A smaller share of a step is not worth reporting.
WORTH = 0.05
# Below this, a bucket is hardly more than the price of sending it.
SMALL_BUCKET_MB = 1.0


def suspects(evidence: Evidence) -> Iterator[Finding]:
    seen, step = evidence.run.attached(), evidence.step
    exchange = step["exchange"] + step["waiting"]
    share = exchange / step["total"]
    timed = f"exposed exchange takes {duration(exchange)} of {duration(step['total'])}"
    if seen.get("strategy") == "dp":
        yield Finding(
            verdict="the model is in nn.DataParallel: one process drives all devices, and copies the model to each in every step",
            why=f"forward, with these copies, takes {duration(step['forward'])} of {duration(step['total'])}",
            next="DistributedDataParallel under torchrun: one process per device, gradients exchanged during backward",
            cause="data-parallel",
            figures={"cause": "data-parallel", "forward_s": step["forward"], "step_s": step["total"]},
        )
    if seen.get("find_unused_parameters"):
        yield Finding(
            verdict="DDP looks for unused parameters after every forward pass (find_unused_parameters=True)",
            why=f"it walks through the graph each time, and the first bucket waits for it; {timed}",
            next="leave it out if every step uses all parameters: DDP raises an error if one does not",
            cause="unused",
            figures={"cause": "unused", "exchange_s": exchange, "step_s": step["total"]},
        )
    bucket = float(seen.get("bucket_mb") or DEFAULT_BUCKET_MB)
    if bucket < SMALL_BUCKET_MB and share > WORTH:
        yield Finding(
            verdict=f"the buckets of DDP are small: bucket_cap_mb={bucket:.3g} instead of {DEFAULT_BUCKET_MB:g}",
            why=f"every bucket is a message of its own; {timed} ({percent(share)})",
            next="leave bucket_cap_mb out",
            cost=share,
            cause="buckets",
            figures={"cause": "buckets", "exchange_s": exchange, "step_s": step["total"]},
        )


def loader(evidence: Evidence) -> tuple[str, str] | None:
    """What to say of the loader that the script trains from, and what to try; None where none was seen."""
    seen = evidence.run.attached().get("loader")
    if not isinstance(seen, dict):
        return None
    workers = int(seen.get("workers") or 0)
    if workers == 0:
        return "; its DataLoader has no workers, so the training thread makes every batch", "num_workers=1 or more"
    return f"; its DataLoader has num_workers={workers}", f"num_workers={2 * workers}, or less work per sample"
