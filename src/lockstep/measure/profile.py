"""torch's own profiler over a few steps: a table of operators, and the trace file that its tools read (docs/timeline.md).

Every rank is looked at, so that none of them holds up the others more than the rest. The steps take longer meanwhile: their times are
for comparing operators with each other, not with other runs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
        """A run that ended early has what there is."""
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
        if not dist.is_initialized():  # else torch says it; its tools want to know
            self._profiler.add_metadata_json("distributedInfo", json.dumps({"rank": 0, "world_size": 1}))

    def _write(self) -> None:
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        averages = profiler.key_averages()
        text = averages.table(sort_by="self_cpu_time_total", row_limit=ROWS)
        self._whole(TABLE, lambda path: path.write_text(text))
        self._whole(TRACE, lambda path: profiler.export_chrome_trace(str(path)))
        # Last: where it is, the others are.
        content = {
            "first_step": self._before + self._first + 1,
            "steps": self._seen,
            "between": self._between,
            "operators": rows(averages),
        }
        write_atomic(self._folder / OPERATORS, content)

    def _whole(self, name: str, write: Callable[[Path], Any]) -> None:
        """The file is there when it is whole, or not at all. torch looks at the ending of the name."""
        temporary = self._folder / f".{os.getpid()}.{name}"
        write(temporary)
        temporary.replace(self._folder / name)


def rows(averages: Any) -> list[dict[str, Any]]:
    """One row an operator, those with the most time of their own first. Times are microseconds over all steps looked at."""
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
