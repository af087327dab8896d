"""Runs the script inside an allocation, and ends it when the process that watches the run ends.

`python -m lockstep.launch.slurm.step SCRIPT [SALLOC_OPTIONS…]`: with options in an allocation of its own, which salloc waits for.
"""

from __future__ import annotations

import os
import signal
import sys

from lockstep.process import die_with_parent


def main() -> None:
    # SIGTERM, for then srun ends its ranks; an srun that is killed outright leaves them training.
    die_with_parent(sign=signal.SIGTERM)
    script, options = sys.argv[1], sys.argv[2:]
    words = ["bash", script]
    words = ["salloc", *options, *words] if options else words
    os.execvp(words[0], words)


if __name__ == "__main__":
    main()
