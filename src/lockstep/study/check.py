"""Whether a training takes as long as its steps and evaluations come to: the check of what a study says of times."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from lockstep.machine import starving
from lockstep.measure.view import RunView
from lockstep.study.gather import Group

Document = dict[str, Any]


def check(groups: Sequence[Group], records: Sequence[Document]) -> Document | None:
    """How far whole trainings were from what their steps and evaluations come to: 0.02 where they took 2 % longer.

    By the windows beside them (beside.py), and in studies from before there were any by the race, however long ago that was. Trainings
    that had not had their cores say nothing of it.
    """
    beside = {record.get("run"): record["beside"] for record in records if record.get("beside")}
    off: list[Document] = []
    starved = 0
    for group in groups:
        for each in group.done:
            summary, time, turns = each.summary, group.time, beside.get(each.run.id)
            if not (each.own and time and time.evaluation is not None and summary.get("train_seconds")):
                continue
            if beside and not turns:
                continue
            image, evaluation = time.cost, time.evaluation
            if turns:
                image, evaluation = (turns["before"] + turns["after"]) / 2, turns["evaluation"]
            images, epochs = float(summary.get("train_images") or 0), int(summary.get("epochs") or 0)
            said = images * image + epochs * evaluation
            took = float(summary["train_seconds"]) + float(summary.get("eval_seconds") or 0.0)
            if said and starving.starved(_cores_had(each.run)):
                starved += 1
            elif said:
                off.append({"cell": group.name, "run": each.run.id, "off": took / said - 1})
    if not off:
        return None
    shares = [abs(one["off"]) for one in off]
    found = {"n": len(off), "median": statistics.median(shares), "worst": max(shares), "runs": off, "starved": starved}
    return found | {"beside": bool(beside)}


def _cores_had(run: RunView) -> float | None:
    """Of runs that did not count it yet, from how long their training threads could have run and had no processor."""
    if run.cores_had is not None:
        return run.cores_had
    epochs = [
        epoch for rank in range(run.ranks) for epoch in run.epochs(rank) if epoch.get("delayed_seconds") is not None
    ]
    seconds = sum(float(epoch["train_seconds"]) for epoch in epochs)
    return 1 - sum(float(epoch["delayed_seconds"]) for epoch in epochs) / seconds if seconds else None
