"""One run while it goes on: its state and that of every rank, its curves, its log. Each look says what is new since the last one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.dashboard import stopping
from lockstep.dashboard.steps import LiveSteps
from lockstep.dashboard.tail import Records, Text
from lockstep.report.curves import thin, values
from lockstep.report.phases import MOST_RANKS
from lockstep.report.views import Axis, Bars, Lines, Numbers, Series, short, shorts
from lockstep.run import OVER, Run, Spec

# The plots that are drawn live, in this order; the report of a run that goes on leaves them out.
LIVE_PLOTS = ("loss-by-step", "step", "accuracy", "loss")
STOP_CHECK_S = 5.0
UNITS = {"accuracy": "percent", "loss": "number"}
Event = tuple[str, Any]
Curve = dict[int, float]


class LiveRun:
    """What somebody who looks at a run is told. `log_rank`: whose log."""

    def __init__(self, root: Path, run: Run, spec: Spec, log_rank: int = 0) -> None:
        self._run, self._spec = run, spec
        ranks = spec.plan.ranks
        self._epochs = Records(root, run.folder / "epochs.jsonl")
        self._rank_epochs = [Records(root, run.rank_folder(rank) / "epochs.jsonl") for rank in range(ranks)]
        self._steps = LiveSteps(root, run, ranks, spec.placement.device == "cuda")
        self._log, self._log_rank = Text(root, run.rank_folder(log_rank) / "log.txt"), log_rank
        self._state: dict[str, Any] | None = None
        self._stop_info: tuple[Any, float, dict[str, Any]] = (None, 0.0, {})
        self._live = False
        """Has been seen under way; of a run that has ended before, the report has all plots."""

    def look(self) -> list[Event]:
        # The state first: what a run has written before it ended is then read once more after it.
        state = self.state()
        self._live = self._live or state["state"] not in OVER
        found: list[Event] = []
        if state != self._state:
            self._state = state
            found.append(("state", {**state, "now": time.time()}))
        if self._live:
            found += [("plot", chart) for chart in self._new_plots()]
        text = self._log.look()
        if text:
            found.append(("log", {"rank": self._log_rank, "text": text[0], "again": text[1]}))
        if state["state"] in OVER:
            found.append(("ended", {"state": state["state"]}))
        return found

    def _new_plots(self) -> list[Lines | Bars]:
        found: list[Lines | Bars] = []
        if self._steps.look():
            found += self._steps.charts()
        changed = [records.look() for records in (self._epochs, *self._rank_epochs)]
        if any(changed):
            ranks = [records.epochs for records in self._rank_epochs]
            found += [
                chart for name in UNITS if (chart := epoch_chart(name, list(self._epochs.epochs.values()), ranks))
            ]
        return found

    def state(self) -> dict[str, Any]:
        status, beats = self._run.status(), self._run.rank_statuses()
        found = {"state": status["state"], "cause": str(status.get("cause") or ""), "since": status.get("since")}
        first = next((beat for beat in beats if beat.get("rank") == 0), {})
        plan, recipe = self._spec.plan, self._spec.recipe
        found["progress"] = {
            "step": first.get("step"),
            "steps": plan.total_steps,
            "epoch": first.get("epoch"),
            "epochs": recipe.epochs,
            "loss": first.get("loss"),
            "images_per_second": first.get("images_per_second"),
        }
        found["ranks"] = [_rank(beat) for beat in beats]
        return {**found, **self._stop(status)}

    def _stop(self, status: dict[str, Any]) -> dict[str, Any]:
        """Whether it can be stopped from here. All processes are looked at for it, so not every second."""
        key, now = (status["state"], status.get("supervisor_pid")), time.monotonic()
        if self._stop_info[0] != key or now > self._stop_info[1] + STOP_CHECK_S:
            self._stop_info = (key, now, self._can_stop())
        return self._stop_info[2]

    def _can_stop(self) -> dict[str, Any]:
        try:
            watcher = stopping.watcher(self._run)
        except stopping.CannotStop as reason:
            return {"stop": None, "why_not": str(reason)}
        return {"stop": watcher.pid, "study": watcher.study}


def _rank(beat: dict[str, Any]) -> dict[str, Any]:
    keys = ("rank", "state", "time", "step", "waits", "images_per_second", "host", "pid")
    return {key: beat.get(key) for key in keys}


def epoch_chart(name: str, epochs: Sequence[dict[str, Any]], ranks: Sequence[dict[int, Any]]) -> Lines | None:
    """Test and train by epoch, the ranks around train; as the report draws them."""
    own = [curve for each in ranks if (curve := values(list(each.values()), f"train_{name}"))]
    test, train = values(epochs, f"test_{name}"), values(epochs, f"train_{name}")
    series = [line for line in (_line("test", "c0", test, []), _line("train", "c1", train, own)) if line]
    if not series:
        return None
    if len(ranks) > 1:
        each = (_line(f"rank {rank}", f"c{(rank + 2) % 8}", curve, [], "ranks") for rank, curve in enumerate(own))
        series += [line for line in each if line][:MOST_RANKS]
    says = f"{name.capitalize()} after each epoch; test is measured over the whole test set, train while training."
    return Lines(
        id=name,
        section="learning",
        title=name.capitalize(),
        says=says + (" Bands: least and most of its ranks." if any(line.low for line in series) else ""),
        x=Axis(label="epoch", unit="count"),
        y=Axis(label=name, unit=UNITS[name]),
        series=series,
        hidden=["ranks"],
    )


def _line(name: str, colour: str, curve: Curve, around: Sequence[Curve], role: str = "") -> Series | None:
    if not curve:
        return None
    epochs = sorted(curve)
    keep = [epochs[place] for place in thin([curve[epoch] for epoch in epochs])]
    several = len(around) > 1
    low: Numbers = [_end(around, epoch, least=True) for epoch in keep] if several else []
    high: Numbers = [_end(around, epoch, least=False) for epoch in keep] if several else []
    return Series(
        name=name,
        colour=colour,
        x=[float(epoch) for epoch in keep],
        y=shorts(curve[epoch] for epoch in keep),
        low=low,
        high=high,
        role=role or name,
        dash=name != "test",
    )


def _end(curves: Sequence[Curve], epoch: int, least: bool) -> float | None:
    found = [curve[epoch] for curve in curves if epoch in curve]
    return short(min(found) if least else max(found)) if found else None
