"""One running run: its state and that of every rank, its curves, its log. Each update has what is new since the last one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from lockstep.dashboard import stopping
from lockstep.dashboard.steps import LiveSteps
from lockstep.dashboard.tail import Changes, Text
from lockstep.inside.layout import LOGGED_FILE
from lockstep.report.curves import by_epoch, curves_of, logged
from lockstep.report.subject import of_runs
from lockstep.report.views import Bars, Lines
from lockstep.run import DAMAGED, OVER, Run, Spec

# The plots that are drawn live beside the learning curves and what a script logs; the report of a running run leaves all of them out.
LIVE_PLOTS = ("loss-by-step", "rate", "step")
STOP_CHECK_S = 5.0
Event = tuple[str, Any]


class LiveRun:
    """The updates for one viewer of a run. `log_rank`: the rank whose log is shown."""

    def __init__(self, root: Path, run: Run, spec: Spec, log_rank: int = 0) -> None:
        self._run, self._spec = run, spec
        self._steps = LiveSteps(root, run, spec.plan, spec.placement.device == "cuda")
        folders = [run.folder, *map(run.rank_folder, range(spec.plan.ranks))]
        self._epochs = Changes([folder / "epochs.jsonl" for folder in folders])
        self._logged = Changes([folder / LOGGED_FILE for folder in folders[1:]])
        self._log, self._log_rank = Text(root, run.rank_folder(log_rank) / "log.txt"), log_rank
        self._state: dict[str, Any] | None = None
        self._stop_info: tuple[Any, float, dict[str, Any]] = (None, 0.0, {})
        self._live = False
        """Whether the run has been seen running; if it had ended before, the report has all plots."""

    def look(self) -> list[Event]:
        # The state is read first: what a run wrote before it ended is then read once more afterwards.
        state = self.state()
        self._live = self._live or state["state"] not in OVER
        found: list[Event] = []
        if state != self._state:
            self._state = state
            found.append(("state", {**state, "now": time.time()}))
        if self._live and state["state"] != DAMAGED:
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
        if self._epochs.look():
            subject = of_runs([self._run])
            found += [chart for name in curves_of(subject) if (chart := by_epoch(subject, name))]
        if self._logged.look():
            found += logged(of_runs([self._run]))
        return found

    def state(self) -> dict[str, Any]:
        status, beats = self._run.status(), self._run.rank_statuses()
        found = {"state": status["state"], "cause": str(status.get("cause") or ""), "since": status.get("since")}
        first = next((beat for beat in beats if beat.get("rank") == 0), {})
        plan, recipe = self._spec.plan, self._spec.recipe
        found["progress"] = {
            "step": first.get("step"),
            "steps": plan.total_steps or None,
            "epoch": first.get("epoch"),
            "epochs": None if self._spec.options.attached else recipe.epochs,
            "loss": first.get("loss"),
            "images_per_second": first.get("images_per_second"),
        }
        found["ranks"] = [_rank(beat) for beat in beats]
        return {**found, **self._stop(status)}

    def _stop(self, status: dict[str, Any]) -> dict[str, Any]:
        """Whether it can be stopped from here. This scans all processes, so it is not done every second."""
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
