"""torch's own profiler over a few steps: a table of operators, and the trace file that its tools read (docs/timeline.md).

Every rank is profiled, so that none of them holds up the others. Profiled steps take longer: their times are for comparing operators
with each other, not with other runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lockstep.files import replacing, write_atomically
from lockstep.measure.records import WARMUP_STEPS
from lockstep.run import write_atomic

TABLE, OPERATORS, TRACE = "operators.txt", "operators.json", "profile.json"
# Lines of operators.txt; operators.json has all of them.
ROWS = 40


class Profile:
    """Starts torch's profiler after warm-up and writes what it found when its steps are over."""

    def __init__(self, folder: Path, steps: int, rows_before: int, steps_before: int = 0) -> None:
        """`rows_before`: step rows that come before its own, beside those of warm-up. `steps_before`: steps of another run."""
        self._folder = folder
        self._first, self._before = rows_before + WARMUP_STEPS, steps_before
        self._steps, self._seen = steps, 0
        self._between: list[str] = []
        self._profiler: Any = None

    def after_step(self, rows: int) -> None:
        if rows == self._first:
            self._start()
        elif self._profiler is not None:
            self._seen += 1
            if self._seen < self._steps:
                self._profiler.step()
            else:
                self._write()

    def aside(self, name: str, begin: float) -> None:
        """The profiler sees it too: an evaluation's operators are in the table, which says so."""
        if self._profiler is not None:
            self._between.append(name)

    def close(self) -> None:
        """Called at the end: a run that ended early writes what it has."""
        if self._profiler is not None and self._seen:
            self._write()

    def _start(self) -> None:
        import torch
        import torch.distributed as dist
        from torch.profiler import ProfilerAction, ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        # A schedule, though it is always the same: without one, torch does not mark the steps in its trace.
        self._profiler = profile(
            activities=activities, schedule=lambda step: ProfilerAction.RECORD, profile_memory=True
        )
        self._profiler.start()
        if not dist.is_initialized():  # without a process group torch does not add it, and its tools need it
            self._profiler.add_metadata_json("distributedInfo", json.dumps({"rank": 0, "world_size": 1}))

    def _write(self) -> None:
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        averages = profiler.key_averages()
        text = averages.table(sort_by="self_cpu_time_total", row_limit=ROWS)
        write_atomically(self._folder / TABLE, text.encode(), durable=False)
        with replacing(self._folder / TRACE, durable=False) as temporary:
            profiler.export_chrome_trace(str(temporary))
        # Written last: if this file exists, so do the others.
        content = {
            "first_step": self._before + self._first + 1,
            "steps": self._seen,
            "between": self._between,
            "operators": rows(averages),
        }
        write_atomic(self._folder / OPERATORS, content)


def rows(averages: Any) -> list[dict[str, Any]]:
    """One row per operator, sorted by self time. Times are microseconds over all profiled steps."""
    own = sum(entry.self_cpu_time_total for entry in averages)
    found = [
        {
            "name": entry.key,
            "calls": entry.count,
            "self_cpu_share": entry.self_cpu_time_total / own if own else 0.0,
            "self_cpu_us": entry.self_cpu_time_total,
            "cpu_total_us": entry.cpu_time_total,
            "cpu_memory_bytes": entry.cpu_memory_usage,
            "self_cpu_memory_bytes": entry.self_cpu_memory_usage,
        }
        for entry in averages
    ]
    return sorted(found, key=lambda row: -row["self_cpu_us"])
