"""Finds out what this machine does and keeps it; what the first run starts in its background."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from lockstep.machine import facts, trial

NICENESS = 10

if __name__ == "__main__":
    # It must not disturb the run beside it, and not be starved by it either: a case has a time limit. Where the kernel groups
    # processes by session, the group has a niceness of its own.
    os.nice(NICENESS)
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(NICENESS))
    try:
        facts.get()
    except trial.NotKnown as error:
        sys.exit(f"lockstep: {error}")
