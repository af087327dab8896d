"""Starts bench.py for each number of threads, and makes a table with intervals from what it answers."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from lockstep.deploy.bench import Request, routes
from lockstep.errors import RunFailed
from lockstep.process import KEEP_MEMORY
from lockstep.statistics import median_interval
from lockstep.units import counted

BASELINE = "fp32 eager"
MEMORY_BATCH = 128


def measure(request: Request, threads: list[int], compiled: bool, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """One row for each number of threads, batch and route."""
    rows: list[dict[str, Any]] = []
    names = routes(compiled)
    for count in threads:
        say(f"timing {counted(len(names), 'route')} with {counted(count, 'thread')}")
        answer = start(msgspec.structs.replace(request, threads=count, routes=names))
        for batch, samples in answer["samples"].items():
            rows += [_row(count, int(batch), name, samples) for name in samples]
        rows += [{"threads": count, "route": name, "failed": why} for name, why in answer["failed"].items()]
    return rows


def _row(threads: int, batch: int, name: str, samples: dict[str, list[float]]) -> dict[str, Any]:
    times = samples[name]
    # Pair by pair within a round: what slows down the machine slows down both.
    ratios = [theirs / ours for ours, theirs in zip(times, samples[BASELINE], strict=True)]
    return {
        "threads": threads,
        "batch": batch,
        "route": name,
        "rounds": len(times),
        "seconds": statistics.median(times),
        **_ends("seconds", times),
        "images_per_second": batch / statistics.median(times),
        "speed_up": statistics.median(ratios),
        **_ends("speed_up", ratios),
    }


def _ends(key: str, values: list[float]) -> dict[str, float | None]:
    found = median_interval(values, log=True)
    return {f"{key}_low": found.low if found else None, f"{key}_high": found.high if found else None}


def memory(request: Request, say: Callable[[str], None], names: list[str] | None = None) -> list[dict[str, Any]]:
    """Peak resident growth of each route that has no compiler in it (compiling grows more than any model), each in a process of its own."""
    names = names or [name for name in routes(compiled=False) if not name.endswith("quantizer")]
    say(f"memory of {counted(len(names), 'route')} at batch {MEMORY_BATCH}")
    rows = []
    for name in names:
        answer = start(msgspec.structs.replace(request, threads=1, routes=[name], batches=[MEMORY_BATCH], memory=True))
        for route, growth in answer["growth_bytes"].items():
            rows.append({"route": route, "batch": MEMORY_BATCH, "growth_bytes": growth})
        rows += [{"route": route, "batch": MEMORY_BATCH, "failed": why} for route, why in answer["failed"].items()]
    return rows


def start(request: Request) -> dict[str, Any]:
    """What the measuring process answers: raw times by size of batch and route, or growth of memory."""
    threads = str(request.threads)
    environment = {**KEEP_MEMORY, **os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    with tempfile.TemporaryDirectory(prefix="lockstep-quantize-") as folder:
        path = Path(folder) / "request.json"
        path.write_bytes(msgspec.json.encode(request))
        argv = [sys.executable, "-m", "lockstep.deploy.bench", str(path)]
        done = subprocess.run(argv, env=environment, capture_output=True, text=True)
    if done.returncode:
        reason = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no word")
        raise RunFailed(f"the measuring process ended with {done.returncode}: {reason}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer
