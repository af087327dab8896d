"""The same causes in plain PyTorch under TraceML (traceml-ai): what its end-of-run summary says first.

Scored in its favour: "compute-bound" names nothing (it says so of any healthy run), a straggler counts for whatever makes that rank slow, and
evaluation and logging are within the step that it traces, where it can see them. It has no verdict about the exchange, buckets or threads.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import environment
from benchmarks.planted.causes import HERE, SIZES, Cause
from benchmarks.planted.work import EPOCHS, STEPS_PER_EPOCH
from benchmarks.processes import run

RANKS = ("STRAGGLER", "COMPUTE_STRAGGLER")
NAMES = {
    "throttled rank": RANKS,
    "busy neighbour": RANKS,
    "slow loader": ("INPUT_BOUND", "INPUT_STRAGGLER"),
    "evaluation": ("RESIDUAL_HEAVY",),
    "waiting log": ("RESIDUAL_HEAVY", *RANKS),
}
# Said of any run in which nothing else stands out.
NOTHING = ("COMPUTE_BOUND", "BALANCED", "NORMAL", "NO_GPU", "NO_CLEAR_PERFORMANCE_BOTTLENECK")
PHASES = {"INPUT_BOUND": "input_wait_ms", "RESIDUAL_HEAVY": "residual_ms"}
BUCKETS_MB = (0.4, 0.15, 0.06, 0.025)
NAME = "TraceML"
# They need two hosts, and it looks at steps and phases: what is between hosts is part of backward there.
LEFT_OUT = ("throttled host", "slow link")


def executed(cause: Cause, size: float) -> dict[str, Any]:
    # A step of its loop takes longer than one of ours, so sizes are shares of its own.
    words = ["--cause", cause.name, "--size", str(size), "--step", str(step_seconds())]
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        if cause.name == "too many threads":
            words += ["--threads", "2"]
        if cause.name == "tiny buckets":
            words += ["--bucket-mb", str(BUCKETS_MB[SIZES.index(size)])]
        ranks = _traced(words, Path(folder))
        summary = json.loads((Path(folder) / "planted" / "final_summary.json").read_text())
    said: dict[str, Any] = summary["primary_diagnosis"]
    kind, evidence = str(said["kind"]), said["evidence"]
    named = kind in NAMES.get(cause.name, ())
    phase = PHASES.get(kind, "")
    return {
        "cause": cause.name,
        "planted": size,
        "true": max(rank["spent"] / rank["seconds"] for rank in ranks) or size / (1 + size),
        "first": "" if kind in NOTHING else kind,
        "named_first": named,
        "stated": evidence[phase] / evidence["step_time_ms"] if named and phase else None,
        "interval": None,
        "verdict": said["summary"],
        "named": {},
    }


@cache
def step_seconds() -> float:
    """A step of the loop under TraceML with nothing planted."""
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        return float(_traced([], Path(folder))[0]["seconds"]) / (EPOCHS * STEPS_PER_EPOCH)


def _traced(words: Sequence[str], folder: Path) -> list[dict[str, float]]:
    """What each rank's loop says of itself; TraceML's summary is in the folder then."""
    traceml = environment.peers_python().parent / "traceml"
    at = ["--nproc-per-node", "2", "--logs-dir", str(folder), "--run-name", "planted"]
    run([str(traceml), "run", str(HERE / "traced.py"), *at, "--args", *words, "--out", str(folder)])
    return [json.loads(path.read_text()) for path in sorted(folder.glob("planted-*.json"))]
