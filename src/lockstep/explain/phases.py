"""What makes a part of a step long: the update, what lies beside its phases, the loader, and what else runs on its cores (docs/attach.md)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lockstep.explain.evidence import Evidence
from lockstep.explain.finding import Finding
from lockstep.explain.inflating import WORTH
from lockstep.inside.layout import BESIDE
from lockstep.machine import starving
from lockstep.units import counted, duration, percent

# A processor that others have for so much of the time is worth a word; the system itself takes some.
BUSY = 0.15
# An update of fewer parameters takes little, however it is done; a longer one than this share of a step is worth a try.
MANY_PARAMETERS, LONG_UPDATE = 50, 0.15
# From so many on, values are read in a loop, and making the tensors that are read takes longer than reading them.
MANY_READS = 16


def update(evidence: Evidence, seen: dict[str, Any]) -> Iterator[Finding]:
    updated, step = seen.get("update") or {}, evidence.step
    share = step["optimizer"] / step["total"]
    if (
        share < LONG_UPDATE
        or updated.get("parameters", 0) < MANY_PARAMETERS
        or updated.get("fused")
        or not updated.get("can_fuse")
    ):
        return
    yield Finding(
        verdict=f"the optimizer takes {percent(share)} of a step: it updates {updated['parameters']} parameters one by one",
        why=f"{duration(step['optimizer'])} of {duration(step['total'])}, {duration(step['optimizer'] / updated['parameters'])} for each; "
        f"neither fused nor foreach is on",
        next=f"{seen.get('optimizer', 'the optimizer')}(…, fused=True), else foreach=True",
        cost=share,
        cause="optimizer",
        figures={"cause": "optimizer", "optimizer_s": step["optimizer"], "step_s": step["total"], **updated},
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


def beside(evidence: Evidence, seen: dict[str, Any]) -> Iterator[Finding]:
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


def neighbour(evidence: Evidence, seen: dict[str, Any]) -> Iterator[Finding]:
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
