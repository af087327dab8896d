"""The state of a run, as far as its folder tells."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

ENDED = ("done", "failed", "stalled", "cancelled")
DAMAGED = "damaged"
"""The state of a run with a file that cannot be read: named, shown, and left out of every comparison."""
OVER = (*ENDED, DAMAGED)
"""States in which nothing more is written."""
STALLED_AFTER_S = 30.0
"""A rank gives a sign of life about twice a second; one that is silent for this long is stalled (or its host is)."""


def current_status(
    recorded: dict[str, Any], damage: list[str], beats: Callable[[], list[dict[str, Any]]]
) -> dict[str, Any]:
    """The state as it is now: a run with a damaged file is damaged; one whose supervisor is gone, or whose ranks are silent, is not
    running. `beats`: reads the last sign of life of each rank, which only a run that goes on needs."""
    if damage:
        return {**recorded, "state": DAMAGED, "cause": "; ".join(damage)}
    if recorded["state"] not in ("starting", "running"):
        return recorded
    pid, host = recorded.get("supervisor_pid"), recorded.get("host")
    if pid and host == os.uname().nodename and not _alive(pid):
        return {**recorded, "state": "failed", "cause": f"the process that watched the run (pid {pid}) is gone"}
    now = time.time()
    silent = [beat for beat in beats() if now - beat["time"] > STALLED_AFTER_S and beat.get("state") == "running"]
    if silent:
        oldest = min(silent, key=lambda beat: float(beat["time"]))
        cause = f"rank {oldest['rank']} gave no sign of life for {now - oldest['time']:.0f} s"
        return {**recorded, "state": "stalled", "cause": cause}
    return recorded


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
