"""The answer of a single run: what was trained, where, how well and how long, and where most of a step goes."""

from __future__ import annotations

import shlex
from statistics import fmean

from lockstep.machine import starving
from lockstep.measure.phases import NAMES, waited_for
from lockstep.measure.view import RunView
from lockstep.metrics import learned_keys, recorded
from lockstep.report.spoken import placed
from lockstep.report.views import Said
from lockstep.statistics import MARGIN_RATIO
from lockstep.units import counted, duration, percent

ANSWER = "answer"


def answers(run: RunView) -> list[Said]:
    """One sentence of a run that is done. Of every other the first line says how it stands."""
    if run.state != "done":
        return []
    starved = run.cores_had is not None and starving.starved(run.cores_had)
    largest, why = _step(run)
    if starved or not largest:  # waiting for a core makes longer whichever phase it falls into
        largest, why = "", ""
    text = f"{_what(run)} {_came_to(run)}{largest}"
    return [Said(ANSWER, starving.BESIDE + text if starved else text, why)]


def _what(run: RunView) -> str:
    spec = run.spec()
    if spec.options.attached:
        return f"'{shlex.join(spec.options.attached)}'"
    return f"{spec.recipe.model} on {spec.recipe.data}"


def _came_to(run: RunView) -> str:
    """How well, how long and where."""
    spec, summary = run.spec(), run.summary() or {}
    seconds, where = summary.get("train_seconds"), f"with {placed(spec.placement)}"
    keys = [key for key in learned_keys(spec.recipe) if key.startswith("test_") and summary.get(key) is not None]
    key = "test_accuracy" if "test_accuracy" in keys else keys[0] if keys else ""
    took = f" in {duration(seconds)}" if seconds else ""
    if not key:
        return f"took {counted(int(summary.get('steps') or 0), 'step')}{took}, {where}"
    verb = "reached" if key == "test_accuracy" else "ended with"
    return f"{verb} a {recorded(key).label} of {recorded(key).text(summary[key])}{took}, {where}"


def _step(run: RunView) -> tuple[str, str]:
    """The largest part of a step, and all of its parts; empty where the records of steps are gone (a study that was unpacked)."""
    ranks = run.split()
    if not ranks:
        return "", ""
    mean = {name: fmean(parts[name] for parts in ranks) for name in ranks[0]}
    share = {name: mean[name] / mean["total"] for name in NAMES}
    largest = max(NAMES, key=share.__getitem__)
    shares = ", ".join(f"{name} {percent(share[name])}" for name in NAMES if share[name] > 0.0005)
    owner = f"; {waited_for(run.after_warmup())}" if share["waiting"] > MARGIN_RATIO else ""
    return (
        f"; the largest part of a step is {largest} ({percent(share[largest])})",
        f"a step takes {duration(mean['total'])} on average: {shares}{owner}",
    )
