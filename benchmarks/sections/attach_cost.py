"""What `lockstep attach` costs: windows of steps with its hooks and without, in turns, within one process.

Two processes, one attached and one alone, were raced first: in 8 minutes and 63 starts of each the interval was still 4 % wide, because a
process differs from another by several per cent for its whole life. What the hooks say of themselves stands beside it.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import ours, parts
from benchmarks.attached.launch import THREADS, command
from benchmarks.attached.scripts.lengths import steps_of
from benchmarks.processes import ContenderFailed
from benchmarks.record import Measurement, Section, compare
from benchmarks.settings import Settings
from benchmarks.suspects.execute import run

TARGET = 1.01
STARTS, WINDOWS = 3, 80


class Kind(NamedTuple):
    script: str
    ranks: int
    width: int

    @property
    def name(self) -> str:
        size = "" if self.width == 32 else ", small net"
        return f"{self.script}, {self.ranks} rank{'s' if self.ranks > 1 else ''}{size}"


KINDS = (Kind("plain", 1, 32), Kind("plain", 1, 4), Kind("plain", 2, 32), Kind("Lightning", 1, 32))


def measure(settings: Settings) -> Section:
    """A share of 100.5 % means that a step with hooks takes 0.5 % longer."""
    section = Section("attach-cost", "Steps of a script, with hooks and without, in turns", "step", "milliseconds", [])
    starts, windows = (1, 8) if settings.quick else (STARTS, WINDOWS)
    for kind in KINDS:
        said = []
        for start in range(starts):
            part = f"{kind.name}, start {start + 1}"
            try:
                found = parts.kept("attach-cost", part, partial(_switched, kind, windows))
            except ContenderFailed as error:
                section.refuse(f"{part}: {error}")
                continue
            said.append(found)
            for number, (on, steps, wall, cpu) in enumerate(found["windows"]):
                contender = f"{kind.name}, {'attached' if on else 'alone'}"
                order = len(section.measurements) + 1
                section.measurements.append(
                    Measurement(order, start * windows + number // 2, contender, steps, wall, cpu)
                )
        for clock in ("wall", "cpu"):
            pair = f"{kind.name}, attached", f"{kind.name}, alone"
            if one := compare(section.measurements, *pair, "share", clock=clock, target=TARGET):
                section.comparisons.append(one)
        if said:
            section.notes.append(_note(kind, said))
    return section


def _note(kind: Kind, said: list[dict[str, Any]]) -> str:
    alone, more = [], []
    for found in said:
        one = {on: [wall / steps for is_on, steps, wall, _ in found["windows"] if is_on == on] for on in (True, False)}
        alone += one[False]
        more += [with_ - without for with_, without in zip(one[True], one[False], strict=True)]
    by_themselves = statistics.median(found["seconds"] for found in said)
    return (
        f"{kind.name}: {1e6 * statistics.median(more):+.0f} µs in the median pair of windows, of a step of "
        f"{1e3 * statistics.median(alone):.3g} ms; by the hooks' own account {1e6 * by_themselves:.0f} µs."
    )


def _switched(kind: Kind, windows: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as name:
        file = Path(name) / "windows.json"
        variables = {**THREADS, "WIDTH": str(kind.width), "SWITCHED": str(file), "WINDOWS": str(windows)}
        variables["PYTHONWARNINGS"] = "ignore"
        at = ["--runs", name]
        words = command(kind.script, kind.ranks, steps_of(windows))
        run([ours.executable(), "attach", *at, "--name", "seen", "--", *words], variables)
        summary = json.loads(run([ours.executable(), "show", "seen", *at, "--json"]))
        found: dict[str, Any] = json.loads(file.read_text())
    if found["parts"] == 0:
        raise ContenderFailed("no hook was found that could be taken out")
    print(f"[attach-cost] {kind.name}: {len(found['windows'])} windows", file=sys.stderr, flush=True)
    return {"windows": found["windows"], "seconds": summary["hook_seconds"] / summary["steps"]}
