"""Whether ranks can exchange through shared memory on this machine (backends/shm/): known without starting any."""

from __future__ import annotations

import os
import platform
import sys
from functools import cache


def problem() -> str | None:
    """Why not, to be read after "backend=shm"; None where they can."""
    if not sys.platform.startswith("linux"):
        return "needs Linux"
    if platform.machine().lower() not in ("x86_64", "amd64", "i686", "i386"):
        return f"relies on the order of stores of x86 processors, not {platform.machine()}"
    return _refused()


@cache
def _refused() -> str | None:
    """Python may offer what an older kernel, or a container, refuses."""
    try:
        os.close(os.memfd_create("lockstep"))
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        return f"needs memfd_create and pidfd_open, which this system refuses ({error})"
    return None
