"""How the threads of a rank wait for each other where other work has the cores: asleep, so that whoever they wait for can run.

OpenMP's threads spin for some milliseconds before they sleep. On free cores that is fastest. Where a core has to be shared, a spinning thread uses
up the time of the one that it waits for (docs/placements.md has the measurement). No sum is computed in another order for it.
"""

from __future__ import annotations

import os

from lockstep.machine.cores import cores
from lockstep.placement import Placement, elsewhere

PASSIVE = {"OMP_WAIT_POLICY": "passive"}
# Whoever has set one of these has decided how threads wait.
STATED = (*PASSIVE, "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def reason(asked: Placement, resolved: Placement, taken: int) -> str:
    """Why the ranks' threads wait asleep; empty where they wait as usual. `taken`: cores that other work has (machine/crowded.py)."""
    decided = asked.threads is not None or any(name in os.environ for name in STATED)
    here = resolved.device == "cpu" and not elsewhere(resolved) and resolved.hosts == 1
    if not taken or decided or not here or (resolved.threads or 1) < 2:
        return ""
    return (
        f"other work has {taken} of the {cores()} cores, so threads sleep while they wait for each other (OMP_WAIT_POLICY=passive); "
        f"threads={resolved.threads} keeps them awake"
    )
