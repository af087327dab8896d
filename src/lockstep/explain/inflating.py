"""What a script does that makes other parts of a step longer: until it is gone, their times say little (docs/attach.md)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lockstep.explain.evidence import Evidence
from lockstep.explain.finding import Finding
from lockstep.placement import DEFAULT_BUCKET_MB
from lockstep.units import counted, duration, percent

# A smaller share of a step is not worth reporting.
WORTH = 0.05
# Below this, a bucket is hardly more than the price of sending it.
SMALL_BUCKET_MB = 1.0
# So many backward passes without an unused parameter say something.
LOOKS = 8
# There is about one exchange, and at most about one step of a schedule, per update.
TOO_OFTEN = 1.5


def modes(evidence: Evidence, seen: dict[str, Any]) -> Iterator[Finding]:
    """What makes everything slower while it is on."""
    step = evidence.step
    both = f"forward and backward take {duration(step['forward'] + step['backward'])} of {duration(step['total'])}, with what it adds"
    anomalous, backwards = int(seen.get("anomaly") or 0), int(seen.get("backwards") or 0)
    if anomalous > WORTH * backwards:
        yield _mode(
            "anomaly",
            "autograd's anomaly detection is on",
            f"in {anomalous:,} of {counted(backwards, 'backward pass', 'backward passes')} it keeps a traceback for every operation, and looks for NaN after each one; {both}",
            "leave detect_anomaly out when you have found what you looked for",
        )
    profiled, steps = int(seen.get("profiled") or 0), int(seen.get("steps") or 0)
    if steps and profiled > WORTH * steps:
        yield _mode(
            "profiler",
            f"PyTorch's profiler records {percent(profiled / steps)} of the steps",
            f"it was on in {profiled:,} of {steps:,}: every operation of these is written down; {both}",
            "give it a schedule (torch.profiler.schedule), or leave it out",
        )
    if seen.get("numbers") == "float64":
        yield _mode(
            "float64",
            "the model computes in double precision (float64)",
            f"every number has twice the bytes, and a vector half as many of them; {both}",
            "model.float(), and data as float32: arrays of NumPy are float64 unless you say otherwise",
        )
    if seen.get("strategy") == "dp":
        yield _mode(
            "data-parallel",
            "the model is in nn.DataParallel: one process drives all devices, and copies the model to each in every step",
            f"forward, with these copies, takes {duration(step['forward'])} of {duration(step['total'])}",
            "DistributedDataParallel under torchrun: one process per device, gradients exchanged during backward",
        )


def _mode(cause: str, verdict: str, why: str, advice: str) -> Finding:
    return Finding(verdict=verdict, why=why, next=advice, cause=cause, inflates=True, figures={"cause": cause})


def pair(seen: dict[str, Any], key: str) -> tuple[int, int]:
    """Two counts that belong together. Earlier versions told one number, which says too little."""
    told = seen.get(key)
    return (int(told[0]), int(told[1])) if isinstance(told, list | tuple) and len(told) == 2 else (0, 0)


def _exposed(evidence: Evidence) -> str:
    step = evidence.step
    return f"{duration(step['exchange'] + step['waiting'])} of {duration(step['total'])}"


def exchange(evidence: Evidence, seen: dict[str, Any]) -> Iterator[Finding]:
    """What makes the exchange of DDP longer."""
    step = evidence.step
    exposed = step["exchange"] + step["waiting"]
    share = exposed / step["total"]
    timed = f"exposed exchange takes {_exposed(evidence)}"
    figures = {"exchange_s": exposed, "step_s": step["total"]}
    # A parameter that one rank uses is a used one, to DDP; the rank that does not use it would fail without the flag.
    looks = [pair(rank, "unused") for rank in evidence.run.attached_ranks() if rank.get("unused")]
    looked = min((passes for passes, _ in looks), default=0)
    if seen.get("find_unused_parameters") and looked >= LOOKS and not any(unused for _, unused in looks):
        yield Finding(
            verdict="DDP looks for unused parameters after every forward pass, and there are none (find_unused_parameters=True)",
            why=f"none was unused in the {looked} backward passes that were looked at; it walks through the graph each time, the first bucket waits for it, and the ranks exchange what they have found; {timed}",
            next="leave it out if every step uses all parameters: DDP raises an error if one does not",
            cause="unused",
            inflates=True,
            figures={"cause": "unused", **figures},
        )
    bucket = float(seen.get("bucket_mb") or DEFAULT_BUCKET_MB)
    if bucket < SMALL_BUCKET_MB and share > WORTH:
        yield Finding(
            verdict=f"the buckets of DDP are small: bucket_cap_mb={bucket:.3g} instead of {DEFAULT_BUCKET_MB:g}",
            why=f"every bucket is a message of its own; {timed} ({percent(share)})",
            next="leave bucket_cap_mb out",
            cost=share,
            cause="buckets",
            inflates=True,
            figures={"cause": "buckets", **figures},
        )
    exchanged, updates = int(seen.get("exchanged") or 0), int(seen.get("updates") or 0)
    micro = exchanged / updates if updates else 0.0
    if micro > TOO_OFTEN and share > WORTH:
        yield Finding(
            verdict=f"gradients are exchanged {micro:.3g} times per update: accumulation without no_sync",
            why=f"{exchanged:,} backward passes exchanged, for {counted(updates, 'update')}; {timed} ({percent(share)}), and all but the last "
            "exchange of an update could be left out",
            next="'with model.no_sync():' around all but the last pass, or accelerator.accumulate(model)",
            cost=share * (1 - 1 / micro),
            cause="no-sync",
            inflates=True,
            figures={"cause": "no-sync", "exchanged": exchanged, "updates": updates, **figures},
        )


def evaluation(evidence: Evidence, seen: dict[str, Any]) -> Iterator[Finding]:
    """What makes the evaluation longer than it need be."""
    summary = evidence.summary
    seconds = float(summary.get("eval_seconds") or 0.0)
    whole = float(summary.get("train_seconds") or 0.0) + seconds + float(summary.get("checkpoint_seconds") or 0.0)
    share = seconds / whole if whole else 0.0
    if share < WORTH:
        return
    told = f"evaluation takes {duration(seconds)} of {duration(whole)} ({percent(share)})"
    if graded := int(seen.get("graded") or 0):
        yield Finding(
            verdict="the evaluation computes with gradients on: no_grad is missing",
            why=f"{counted(graded, 'call')} in evaluation mode built a graph that no backward used; {told}",
            next="'with torch.no_grad():' around the evaluation: it takes less time, and much less memory",
            cause="no-grad",
            inflates=True,
            figures={"cause": "no-grad", "passes": graded, "eval_s": seconds, "run_s": whole},
        )
    ranks = evidence.spec.plan.ranks
    facts = evidence.run.attached_ranks()
    whole_set = [rank for rank in facts if any(_unsharded(loader) for loader in rank.get("evaluated_by") or [])]
    if ranks > 1 and len(whole_set) == ranks:
        loader = next(loader for loader in facts[0]["evaluated_by"] if _unsharded(loader))
        yield Finding(
            verdict=f"every rank evaluates the whole set: {ranks} times the same {counted(int(loader['batches']), 'batch', 'batches')}",
            why=f"its DataLoader has no distributed sampler; {told}, of which {percent(1 - 1 / ranks)} is done by the others too",
            next="give each rank its share (a DistributedSampler, or a Subset of every N-th sample) and add the sums up, or evaluate on rank 0 alone",
            cost=share * (1 - 1 / ranks),
            cause="unsharded",
            inflates=True,
            figures={"cause": "unsharded", "batches": loader["batches"], "eval_s": seconds, "run_s": whole},
        )


def _unsharded(loader: dict[str, Any]) -> bool:
    """An evaluation loader that gives all of its set; the last batch of a pass is not counted by the hooks."""
    batches = int(loader.get("batches") or 0)
    return (
        loader.get("shares") == 1
        and batches > 0
        and loader["evaluated"] >= (batches - 1) * max(1, loader["passes"] - 1)
    )


def workers(evidence: Evidence, seen: dict[str, Any]) -> Iterator[Finding]:
    loader = seen.get("loader") or {}
    starts, seconds = int(loader.get("starts") or 0), float(loader.get("start_ns") or 0) / 1e9
    whole = float(evidence.summary.get("train_seconds") or 0.0)
    share = seconds / whole if whole else 0.0
    anew = int(loader.get("made") or 1) >= starts  # not one more alone, to look at a batch
    if not loader.get("workers") or (loader.get("persistent") and not anew) or starts < 2 or share < WORTH:
        return
    yield Finding(
        verdict=f"the loader's workers are started anew in every epoch: {percent(share)} of the training",
        why=f"{counted(starts, 'epoch')} began with {duration(seconds / starts)} each until {counted(int(loader['workers']), 'worker')} had started and "
        f"the first batch was there",
        next="make the DataLoader once, before the first epoch, with persistent_workers=True"
        if anew
        else "persistent_workers=True",
        cost=share,
        cause="workers",
        inflates=True,
        figures={"cause": "workers", "starts": starts, "start_s": seconds, "train_s": whole},
    )
