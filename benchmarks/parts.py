"""Parts of a section that takes hours: each is kept as soon as it is measured, so that a section that was stopped goes on where it was.

Parts belong to a commit: what other source measured is never taken for this one's. They are removed when their section is written.
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

FOLDER = ROOT / ".bench-parts"


def kept(section: str, part: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `make` measured for this part, now or earlier."""
    path = _folder(section) / f"{hashlib.sha256(part.encode()).hexdigest()[:16]}.json"
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
