"""What a result was measured on: enough to judge it, nothing that names a host or a folder."""

from __future__ import annotations

import os
import platform
import subprocess
from typing import Any

from benchmarks.processes import ROOT
from lockstep.kernels.build import able
from lockstep.machine.cpu import cpu_model
from lockstep.measure.environment import version_of


def describe() -> dict[str, Any]:
    """CPU, cores, kernel, Python, and the versions that our own environment has."""
    return {
        "cpu": cpu_model(),
        # One name may stand for several generations: what the kernels are compiled for tells them apart.
        "instructions": able()[0],
        "cores": len(os.sched_getaffinity(0)),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: installed(name) for name in ("lockstep", "torch", "numpy")},
        "commit": commit(),
    }


def load_average() -> list[float]:
    """Load over 1, 5 and 15 minutes: what else the machine did."""
    return [round(value, 2) for value in os.getloadavg()]


def installed(package: str) -> str:
    """Its version, or that it is not there."""
    return version_of(package) or "not installed"


def commit() -> str:
    """The source that was measured, and whether it had changes that are in no commit."""
    try:
        name = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--", "src", "benchmarks", ":!benchmarks/results")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{name} with changes" if changed else name


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
