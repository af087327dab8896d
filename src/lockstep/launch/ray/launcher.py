"""`ray`: one process of ours that talks to Ray (driver.py), which starts a monitor per rank, which starts the worker."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from lockstep.errors import InputError
from lockstep.launch.base import Start, default_environment, thread_environment
from lockstep.run import Spec

# The driver ends a Ray of its own in order, which takes two seconds, and removes its files.
ENDS_WITHIN_S = 10.0
HOW_TO_GET = "pip install 'lockstep-bench[ray]'"


def starts(spec: Spec, folder: Path, host_index: int) -> list[Start]:
    if find_spec("ray") is None:
        raise InputError(f"launcher=ray needs Ray, which is not installed: {HOW_TO_GET}")
    argv = [sys.executable, "-m", "lockstep.launch.ray.driver", str(folder)]
    environment, defaults = thread_environment(spec.placement), default_environment(spec.placement)
    return [Start(argv, environment, defaults, what="Ray's driver", ends_within_s=ENDS_WITHIN_S)]
