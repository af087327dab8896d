"""The usual suspects in a training that Lockstep only looks at (docs/attach.md): what its hooks have seen, with the time that it is about.

Three kinds. What changes what is learned comes first. So does what makes other parts of a step longer: until it is gone, their times say little.
The rest is a share of a step that has a name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lockstep.explain.evidence import Evidence
from lockstep.explain.finding import Finding
from lockstep.inside.layout import BESIDE
from lockstep.machine import starving
from lockstep.placement import DEFAULT_BUCKET_MB
from lockstep.units import counted, duration, percent

# A smaller share of a step is not worth reporting.
WORTH = 0.05
# Below this, a bucket is hardly more than the price of sending it.
SMALL_BUCKET_MB = 1.0
# A processor that others have for so much of the time is worth a word; the system itself takes some.
BUSY = 0.15
# An update of fewer parameters takes little, however it is done; a longer one than this share of a step is worth a try.
MANY_PARAMETERS, LONG_UPDATE = 50, 0.15
# From so many on, values are read in a loop, and making the tensors that are read takes longer than reading them.
MANY_READS = 16
# A schedule that goes on every epoch, or every step, has at most about one step per update.
TOO_OFTEN = 1.5


def answer(evidence: Evidence) -> Iterator[Finding]:
    if evidence.spec.options.attached is None or not evidence.step:
        return
    seen = evidence.run.attached()
    yield from _learning(evidence, seen)
    yield from _modes(evidence, seen)
    yield from _exchange(evidence, seen)
    yield from _evaluation(evidence, seen)
    yield from _workers(evidence, seen)
    yield from _update(evidence, seen)
    yield from _beside(evidence, seen)
    yield from _neighbour(evidence, seen)


def _learning(evidence: Evidence, seen: dict[str, Any]) -> Iterator[Finding]:
    """What changes what is learned, or what is measured of it."""
    steps, loader = int(seen.get("steps") or 0), seen.get("loader") or {}
    often = float(seen.get("scheduled") or 0) / steps if steps else 0.0
    if often > TOO_OFTEN:
        yield Finding(
            verdict=f"the learning-rate schedule goes on {often:.3g} times per update",
            why=f"scheduler.step() was called {seen['scheduled']:,} times in {counted(steps, 'update')}: it is over after {percent(1 / often)} of them",
            next="call it once per optimizer.step(); Accelerate calls it once for each process, unless step_scheduler_with_optimizer=False",
            cause="schedule",
            wrong=True,
            figures={"cause": "schedule", "scheduled": seen["scheduled"], "steps": steps},
        )
    if loader.get("same_order"):
        again, passes = int(loader["same_order"]), int(loader["passes"])
        yield Finding(
            verdict="every epoch has the same order of samples: set_epoch is missing",
            why=f"{again} of {passes - 1} epochs after the first had the order of the one before: the DistributedSampler shuffles by its epoch, "
            "which nobody has set",
            next="sampler.set_epoch(epoch) before each epoch",
            cause="order",
            wrong=True,
            figures={"cause": "order", "again": again, "passes": passes},
        )
    for one in [loader, *(seen.get("evaluated_by") or [])]:
        if padded := int(one.get("padded") or 0):
            evaluated, samples = bool(one.get("evaluated")), int(one["samples"])
            what = "the evaluation counts" if evaluated else "an epoch has"
            yield Finding(
                verdict=f"{what} {counted(padded, 'sample')} twice: its sampler pads",
                why=f"{samples:,} samples do not divide by {one['shares']} ranks, so a DistributedSampler takes {samples + padded:,}",
                next="evaluate in one process, or take the samples that were added out of the result"
                if evaluated
                else "drop_last=True, if it matters",
                cause="padding",
                wrong=evaluated,
                figures={"cause": "padding", "padded": padded, "samples": samples, "evaluated": evaluated},
            )
            return


def _modes(evidence: Evidence, seen: dict[str, Any]) -> Iterator[Finding]:
    """What makes everything slower while it is on."""
    step = evidence.step
    both = f"forward and backward take {duration(step['forward'] + step['backward'])} of {duration(step['total'])}, with what it adds"
    if seen.get("anomaly"):
        yield _mode(
            "anomaly",
            "autograd's anomaly detection is on",
            f"it keeps a traceback for every operation, and looks for NaN after each one; {both}",
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


def _exposed(evidence: Evidence) -> str:
    step = evidence.step
    return f"{duration(step['exchange'] + step['waiting'])} of {duration(step['total'])}"


def _exchange(evidence: Evidence, seen: dict[str, Any]) -> Iterator[Finding]:
    """What makes the exchange of DDP longer."""
    step = evidence.step
    exchange = step["exchange"] + step["waiting"]
    share = exchange / step["total"]
    timed = f"exposed exchange takes {_exposed(evidence)}"
    figures = {"exchange_s": exchange, "step_s": step["total"]}
    if seen.get("find_unused_parameters") and not seen.get("unused"):
        yield Finding(
            verdict="DDP looks for unused parameters after every forward pass, and there are none (find_unused_parameters=True)",
            why=f"it walks through the graph each time, the first bucket waits for it, and the ranks exchange what they have found; {timed}",
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
    passes, synced = seen.get("passes") or (0, 0)
    steps = int(seen.get("steps") or 0)
    micro = passes / steps if steps else 0.0
    if micro > TOO_OFTEN and synced > 0.9 * passes and share > WORTH:
        yield Finding(
            verdict=f"gradients are exchanged {micro:.3g} times per update: accumulation without no_sync",
            why=f"each of {passes:,} backward passes exchanged, for {counted(steps, 'update')}; {timed} ({percent(share)}), and all but the last "
            "exchange of an update could be left out",
            next="'with model.no_sync():' around all but the last pass, or accelerator.accumulate(model)",
            cost=share * (1 - 1 / micro),
            cause="no-sync",
            inflates=True,
            figures={"cause": "no-sync", "passes": passes, "steps": steps, **figures},
        )


def _evaluation(evidence: Evidence, seen: dict[str, Any]) -> Iterator[Finding]:
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


def _workers(evidence: Evidence, seen: dict[str, Any]) -> Iterator[Finding]:
    loader = seen.get("loader") or {}
    starts, seconds = int(loader.get("starts") or 0), float(loader.get("start_ns") or 0) / 1e9
    whole = float(evidence.summary.get("train_seconds") or 0.0)
    share = seconds / whole if whole else 0.0
    if not loader.get("workers") or loader.get("persistent") or starts < 2 or share < WORTH:
        return
    yield Finding(
        verdict=f"the loader's workers are started anew in every epoch: {percent(share)} of the training",
        why=f"{counted(starts, 'epoch')} began with {duration(seconds / starts)} each until {counted(int(loader['workers']), 'worker')} had started and "
        f"the first batch was there",
        next="persistent_workers=True",
        cost=share,
        cause="workers",
        inflates=True,
        figures={"cause": "workers", "starts": starts, "start_s": seconds, "train_s": whole},
    )


def _update(evidence: Evidence, seen: dict[str, Any]) -> Iterator[Finding]:
    update, step = seen.get("update") or {}, evidence.step
    share = step["optimizer"] / step["total"]
    if (
        share < LONG_UPDATE
        or update.get("parameters", 0) < MANY_PARAMETERS
        or update.get("fused")
        or not update.get("can_fuse")
    ):
        return
    yield Finding(
        verdict=f"the optimizer takes {percent(share)} of a step: it updates {update['parameters']} parameters one by one",
        why=f"{duration(step['optimizer'])} of {duration(step['total'])}, {duration(step['optimizer'] / update['parameters'])} for each; "
        f"neither fused nor foreach is on",
        next=f"{seen.get('optimizer', 'the optimizer')}(…, fused=True), else foreach=True",
        cost=share,
        cause="optimizer",
        figures={"cause": "optimizer", "optimizer_s": step["optimizer"], "step_s": step["total"], **update},
    )


SAYS = {
    "logging": ("what is logged", "the calls of the logger or of the writer themselves", "log every few steps"),
    "progress": ("the progress bar", "calls of tqdm", "update it every few steps (mininterval, miniters)"),
    "schedule": ("the learning-rate schedule", "calls of scheduler.step()", "once per update is enough"),
    "callbacks": (
        "your own callbacks",
        "methods (on_…) of your callbacks and modules, which the trainer calls",
        "see what they do in every step, and do it every few steps",
    ),
    "collecting": (
        "Python's garbage collector",
        "{collections} of the whole heap",
        "leave gc.collect() out of the loop; it also runs by itself",
    ),
    "framework": (
        "the framework's own loop",
        "what it does around forward, backward and update",
        "a larger batch, so that it weighs less",
    ),
}


def _beside(evidence: Evidence, seen: dict[str, Any]) -> Iterator[Finding]:
    """What of a step lies beside its phases, by name."""
    step, parts = evidence.step, evidence.run.beside()
    if not parts:
        return
    total = step["total"]
    rest = max(0.0, step["other"] - sum(parts[name] for name in BESIDE))
    collections = counted(int(seen.get("collections") or 0), "collection")
    for name, (what, how, advice) in SAYS.items():
        share = parts[name] / total
        if share >= WORTH:
            yield Finding(
                verdict=f"{percent(share)} of a step goes to {what}",
                why=f"{duration(parts[name])} of {duration(total)}: {how.format(collections=collections)}",
                next=advice,
                cost=share,
                cause=name,
                figures={"cause": name, f"{name}_s": parts[name], "step_s": total},
            )
    many = parts["reads"] >= MANY_READS
    reading = parts["reading"] + (rest if many else 0.0)
    if reading >= WORTH * total:
        around = ", with the tensors that are made for it" if many else ""
        yield Finding(
            verdict=f"{parts['reads']:,.0f} values a step are read out of tensors, which takes {percent(reading / total)} of it",
            why=f".item(), float(), int(), bool(), .cpu() and .tolist() take {duration(reading)} of {duration(total)}{around}",
            next="add up in a tensor, and read it every few steps",
            cost=reading / total,
            cause="reading",
            figures={"cause": "reading", "reads": parts["reads"], "reading_s": reading, "step_s": total},
        )
    elif rest >= WORTH * total:
        yield Finding(
            verdict=f"{percent(rest / total)} of a step has no name: {duration(rest)} between the update and the next batch",
            why="printing, Python around a short step, or batches that the script makes by hand: no function that has a hook",
            next="print and compute every few steps, or a larger batch",
            cost=rest / total,
            cause="besides",
            figures={"cause": "besides", "other_s": rest, "step_s": total},
        )


def _neighbour(evidence: Evidence, seen: dict[str, Any]) -> Iterator[Finding]:
    """Of one process; between several ranks, "straggler" tells, and of a training that was starved as a whole, "machine"."""
    waited, since = float(seen.get("delayed_seconds") or 0.0), float(seen.get("since_seconds") or 0.0)
    starved = starving.starved(evidence.run.cores_had)
    if evidence.spec.plan.ranks > 1 or not since or waited < BUSY * since or starved:
        return
    yield Finding(
        verdict=f"something else runs on its cores: for {percent(waited / since)} of the time the training thread had no processor",
        why=f"it could have run and had to wait for {duration(waited)} of {duration(since)}, which Linux counts",
        next="find it with 'top', and keep the cores free",
        cost=waited / since,
        cause="neighbour",
        figures={"cause": "neighbour", "delayed_s": waited, "since_s": since},
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
