"""Every built-in study with `--quick`, as a student runs it: how long it takes, and how much of what it asks is settled by then."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import ours, parts
from benchmarks.processes import ContenderFailed, run
from benchmarks.record import Measurement, Section
from benchmarks.sections.start import children_cpu
from benchmarks.settings import Settings
from lockstep.study.builtin import names

GOAL_S, ALL_S = 300.0, 3600.0
# The search behind another study, of 102 trainings: no published experiment.
NOT_ASKED = ("optimizer-rates",)


def measure(settings: Settings) -> Section:
    """One after the other, each in an empty folder. What has been run is kept until all of them have."""
    section = Section("studies", "Every built-in study, with --quick", "study", "milliseconds", [])
    asked = [name for name in names() if name not in NOT_ASKED]
    for name in asked[:1] if settings.quick else asked:
        try:
            found = parts.kept("studies", name, partial(_study, name))
        except ContenderFailed as error:
            section.refuse(f"{name} failed: {error}")
            continue
        section.measurements.append(
            Measurement(len(section.measurements) + 1, 1, name, 1, found["seconds"], found["cpu"])
        )
        late = "" if found["seconds"] <= GOAL_S else f"; longer than {GOAL_S / 60:.0f} minutes"
        section.notes.append(f"{name}: {found['settled']} of {found['compared']} comparisons and claims settled{late}")
    whole = sum(one.wall_seconds for one in section.measurements)
    met = "met" if whole <= ALL_S else "missed"
    section.notes.insert(0, f"All of them: {whole / 60:.0f} minutes (goal: an hour, {met}).")
    return section


def _study(name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        cpu, wall = children_cpu(), time.perf_counter()
        text = run(
            [ours.executable(), "study", "run", name, "--quick", "--json"],
            more={"LOCKSTEP_RUNS": folder},
            where=Path(folder),
        )
        seconds, cpu = time.perf_counter() - wall, children_cpu() - cpu
    verdicts = list(_verdicts(json.loads(text)))
    return {"seconds": seconds, "cpu": cpu, "settled": sum(verdicts), "compared": len(verdicts)}


def _verdicts(document: dict[str, Any]) -> Iterable[bool]:
    """Of time and accuracy of each cell against the baseline, and of every claim: whether it is settled."""
    for cell in document["cells"]:
        for metric in ("seconds", "accuracy"):
            if against := cell["metrics"].get(metric, {}).get("against_baseline"):
                yield against["verdict"] not in ("not significant", "too few")
    for published in document["published"]:
        for claim in published["claims"]:
            if claim["verdict"] != "not measured here":
                yield claim["verdict"] != "not settled"
