"""Runs the script inside an allocation, and ends it when the process that watches the run ends.

`python -m lockstep.launch.slurm_step SCRIPT`
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from lockstep.process import PARENT

_PR_SET_PDEATHSIG = 1


def main() -> None:
    # SIGTERM, for then srun ends its ranks; an srun that is killed outright leaves them training. It outlives exec.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(os.environ[PARENT]):
        sys.exit(128 + signal.SIGTERM)
    os.execvp("bash", ["bash", sys.argv[1]])


if __name__ == "__main__":
    main()
