"""What else does a run do? What goes on between steps (evaluation, records, checkpoints), and within them beside their phases."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lockstep.explain import blocks
from lockstep.explain.evidence import Evidence
from lockstep.explain.finding import Finding
from lockstep.measure.phases import Rows
from lockstep.measure.records import PHASES
from lockstep.statistics import MARGIN_RATIO
from lockstep.units import counted, duration, percent

# A smaller share is not worth reporting; and it has to be surely more than one that nobody would act on.
WORTH, LEAST = 0.05, MARGIN_RATIO
ADVICE = {
    "evaluation": "evaluate less often, or test_limit=… while you try things out",
    "logging": "put the runs on a faster disk (--runs)",
    "checkpoints": "--checkpoint-every with a larger number",
}
OWN_LOOP = {
    "evaluation": "evaluate less often, or on fewer samples",
    "logging": "put the runs on a faster disk (--runs)",
    "checkpoints": "save less often",
}
SECONDS = {"evaluation": "eval_seconds", "logging": "logging_seconds"}


def answer(evidence: Evidence) -> Iterator[Finding]:
    yield from _between(evidence)
    yield from _within(evidence)


def _between(evidence: Evidence) -> Iterator[Finding]:
    """All ranks wait for records and checkpoints, and share the evaluation. Checkpoints are known for the whole run only."""
    summary, epochs = evidence.summary, evidence.epochs
    seconds = {name: float(summary.get(key) or 0.0) for name, key in SECONDS.items()}
    seconds["checkpoints"] = float(summary.get("checkpoint_seconds") or 0.0)
    whole = float(summary.get("train_seconds") or 0.0) + sum(seconds.values())
    largest = max(seconds, key=lambda name: seconds[name])
    share = seconds[largest] / whole if whole else 0.0
    if share < WORTH:
        return
    interval = _over_epochs(epochs, SECONDS[largest]) if largest in SECONDS else None
    surely = interval is None or interval[0] > LEAST
    yield Finding(
        verdict=f"{percent(share)} of the run is {largest}, between its steps",
        why=", ".join(f"{name} {duration(value)}" for name, value in seconds.items())
        + f" of {duration(whole)}{_told(interval, 'over ' + counted(len(epochs), 'epoch'))}",
        next=(OWN_LOOP if evidence.spec.options.own_loop else ADVICE)[largest],
        cost=share,
        interval=interval,
        cause=largest if surely else "",
        figures={"outside_s": seconds, "run_s": whole},
    )


def _over_epochs(epochs: list[dict[str, float]], key: str) -> tuple[float, float] | None:
    parts = [
        [float(epoch.get(name) or 0.0) for name in (key, "train_seconds", *SECONDS.values())]
        for epoch in epochs
        if epoch.get("train_seconds")
    ]
    return blocks.mean(np.array([part[0] / sum(part[1:]) for part in parts])).ends if parts else None


def _within(evidence: Evidence) -> Iterator[Finding]:
    """Of the rank that has least of it: what one rank has more than the others is for "straggler" to tell."""
    if not evidence.step or evidence.run.beside():  # of an attached command, "script" tells by name
        return
    step = evidence.step["total"]
    other = [_beside(rows) for rows in evidence.ranks]
    found = blocks.mean(min(other, key=lambda seconds: float(seconds.mean()))).of(step)
    if found.value < WORTH or found.low < LEAST:
        return
    yield Finding(
        verdict=f"{percent(found.value)} of a step is beside its phases: {duration(found.value * step)} that belong to none of them",
        why=f"printing, logging, reading a loss, or Python around a short step{_told(found.ends, 'over blocks of steps')}",
        next="log every few steps, and from another thread"
        if evidence.spec.options.own_loop
        else "a larger batch, so that it weighs less",
        cost=found.value,
        interval=found.ends,
        cause="besides",
        figures={"other_s": found.value * step, "step_s": step},
    )


def _beside(rows: Rows) -> Rows:
    """Seconds of each step that no phase accounts for."""
    return np.asarray(rows["total_ns"] - sum(rows[f"{phase}_ns"] for phase in PHASES)) / 1e9


def _told(interval: tuple[float, float] | None, over: str) -> str:
    return f" ({percent(interval[0])} to {percent(interval[1])}, 95 % interval {over})" if interval else ""
