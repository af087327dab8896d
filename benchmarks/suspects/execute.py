"""One execution: attach to a script with a planted cause, explain it, and see what is named first."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import environment, ours
from benchmarks.processes import TIMEOUT_SECONDS, ContenderFailed
from benchmarks.suspects.causes import Cause

# What other programs on the machine do to a run is true, and not what is asked: it counts where it was planted.
MACHINE = ("neighbour", "turns", "pause")


def executed(cause: Cause, python: Path | None = None) -> dict[str, Any]:
    """What `lockstep explain` says first. `python`: of an environment with the frameworks; the peers' by default."""
    command = cause.command(str(python or environment.peers_python()))
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as runs:
        at = ["--runs", runs]
        run([ours.executable(), "attach", *at, "--name", "planted", "--", *command])
        told = run([ours.executable(), "explain", "planted", *at, "--json"])
    findings = [each for each in json.loads(told)["findings"] if each["cause"]]
    counted = [each for each in findings if each["cause"] not in MACHINE or each["cause"] == cause.named]
    first = counted[0] if counted else {"cause": "", "verdict": "", "why": "", "cost": 0.0}
    return {
        "cause": cause.name,
        "first": first["cause"],
        "right": first["cause"] == cause.named,
        "verdict": first["verdict"],
        "why": first["why"],
        "share": first["cost"],
        "named": [each["cause"] for each in findings],
    }


def run(command: Sequence[str], variables: Mapping[str, str] | None = None) -> str:
    """Its stdout. In an empty folder, so that nothing it writes stays."""
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        environ = {**os.environ, "PYTHONWARNINGS": "ignore", "NO_COLOR": "1", **(variables or {})}
        done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    if done.returncode:
        raise ContenderFailed(f"exit code {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1][:200]}")
    return done.stdout
