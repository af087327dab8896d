"""The peers' own environment, `.bench-venv`: made on demand, from exact versions."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.processes import ROOT

VENV = ROOT / ".bench-venv"
REQUIREMENTS = ROOT / "benchmarks" / "requirements.txt"


def pins(text: str) -> dict[str, str]:
    """Package names and exact versions of a requirements file."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return dict(line.split("==", 1) for line in lines if line)


def peers_python() -> Path:
    """The interpreter of the peers' environment, which is made or brought up to date first."""
    python = VENV / "bin" / "python"
    text = REQUIREMENTS.read_text(encoding="utf-8")
    stamp = VENV / f".installed-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if stamp.exists():
        return python
    print(
        "[peers] making .bench-venv from benchmarks/requirements.txt; some minutes",
        file=sys.stderr,
        flush=True,
    )
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    # Our own constraints do not apply here: the requirements name every package.
    environ = {key: value for key, value in os.environ.items() if key != "PIP_CONSTRAINT"}
    install = [str(python), "-m", "pip", "install", "--quiet"]
    for arguments in ([f"torch=={pins(text)['torch']}"], ["--requirement", str(REQUIREMENTS)]):
        subprocess.run([*install, *arguments], check=True, env=environ, stdout=sys.stderr)
    for old in VENV.glob(".installed-*"):
        old.unlink()
    stamp.touch()
    return python
