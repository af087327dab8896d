"""The same scripts under TraceML (traceml-ai): what its end-of-run summary says first.

Scored in its favour. Its words are few, so one counts for every cause that it could stand for: waiting for input for a loader that is slow or
starts its workers anew, a large residual for whatever is neither input nor compute, a straggler for whatever makes a rank slow. "Compute-bound"
names nothing: it says so of any healthy run.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import environment
from benchmarks.planted.peer import NOTHING as SAYS_NOTHING
from benchmarks.suspects.causes import HERE, ONE, Cause
from benchmarks.suspects.execute import run

NAME = "TraceML"
INPUT, RESIDUAL, RANKS = ("INPUT_BOUND", "INPUT_STRAGGLER"), ("RESIDUAL_HEAVY",), ("STRAGGLER", "COMPUTE_STRAGGLER")
NAMES = {
    "loader": INPUT,
    "workers": INPUT,
    "reading": RESIDUAL,
    "logging": RESIDUAL,
    "collecting": RESIDUAL,
    "callbacks": RESIDUAL,
    "evaluation": RESIDUAL,
    "checkpoints": RESIDUAL,
    "rank": RANKS,
    "neighbour": RANKS,
}


def executed(cause: Cause) -> dict[str, Any]:
    traceml = environment.peers_python().parent / "traceml"
    ranks = [] if cause.launch is ONE else ["--nproc-per-node", "2"]
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        at = [*ranks, "--logs-dir", folder, "--run-name", "planted"]
        words = [str(traceml), "run", str(HERE / cause.script), *at, "--args", cause.name]
        run(words, {"PLANTED_TRACEML": "1"})
        summary = json.loads((Path(folder) / "planted" / "final_summary.json").read_text())
    said: dict[str, Any] = summary["primary_diagnosis"]
    kind = "" if said["kind"] in SAYS_NOTHING else str(said["kind"])
    return {
        "cause": cause.name,
        "first": kind,
        "right": kind in NAMES.get(cause.named, ()) if cause.named else not kind,
        "verdict": said["summary"],
    }
