"""Parts of a section that takes hours: each is kept as soon as it is measured, so that a section that was stopped goes on where it was.

Parts belong to a commit and a kind of processor: what another one measured is never taken for this one's. They are removed when their section is written.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.processes import ROOT
from lockstep.files import write_atomically
from lockstep.machine.cpu import cpu_model

FOLDER = ROOT / ".bench-parts"


def kept(section: str, part: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `make` measured for this part, now or earlier."""
    name = hashlib.sha256(f"{cpu_model()}: {part}".encode()).hexdigest()[:16]
    path = _folder(section) / f"{name}.json"
    if path.exists():
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return document
    document = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(document, indent=1).encode())
    return document


def forget(section: str) -> None:
    """The section is written: its parts are in there."""
    shutil.rmtree(FOLDER / section, ignore_errors=True)


def _folder(section: str) -> Path:
    return FOLDER / section / machine.commit().replace(" ", "-")
