"""Runs the script inside an allocation, and ends it when the process that watches the run ends.

`python -m lockstep.launch.slurm.step SCRIPT`
"""

from __future__ import annotations

import os
import signal
import sys

from lockstep.process import die_with_parent


def main() -> None:
    # SIGTERM, for then srun ends its ranks; an srun that is killed outright leaves them training.
    die_with_parent(sign=signal.SIGTERM)
    os.execvp("bash", ["bash", sys.argv[1]])


if __name__ == "__main__":
    main()
