"""The fused kernels, compiled before the ranks that want them start: what takes seconds there, in a log, nobody would see."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.files import to_stderr
from lockstep.kernels import trial
from lockstep.launch.specification import Draft
from lockstep.placement import elsewhere
from lockstep.recipe import fuses


@contextmanager
def kernels_made(draft: Draft) -> Iterator[None]:
    """They are made while the block prepares the rest, once for a machine; it ends when they are there.

    Whether that went well is the ranks' business, who say it in one line.
    """
    child = None
    if _wanted(draft) and not trial.is_known():
        to_stderr("compiling the fused kernels, once for this machine")
        # Let alone when this process is stopped: it ends within seconds, and what it compiled is there for the next run.
        child = subprocess.Popen(
            [sys.executable, "-m", "lockstep.kernels"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    yield
    if child is not None:
        child.wait()


def _wanted(draft: Draft) -> bool:
    """On a cluster each node compiles for its own processor."""
    placement = draft.placement
    if draft.options.script or placement.device != "cpu" or elsewhere(placement):
        return False
    return fuses(draft.recipe, placement.device)
