"""Waits beside one rank and writes down how it ended, for launchers that do not tell: mpirun, srun, Ray.

`python -m lockstep.launch.monitor RUN_DIR` starts the worker with the same environment, waits for it, and writes
`exit.json` into the rank's folder when a signal ended it. It imports no torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lockstep.backends.ranks import detect
from lockstep.launch.base import worker_argv
from lockstep.process import PARENT, die_with_parent
from lockstep.run import Run
from lockstep.training.leaving import hold_back, let_through


def main() -> None:
    # The launcher between us and the supervisor is our parent, not the process that this names.
    os.environ.pop(PARENT, None)
    die_with_parent()
    if os.getppid() == 1:  # the launcher ended before we asked
        sys.exit(128 + signal.SIGTERM)
    run = Run.open(Path(sys.argv[1]))
    spec = run.spec()
    rank = detect(spec.placement)
    if spec.gives_way:  # the worker inherits this, and leaves after its first step if it is told to while it starts
        hold_back()
    environment = {**os.environ, PARENT: str(os.getpid())}
    # MPICH's ranks talk to their launcher through an inherited file descriptor, so none is closed.
    worker = subprocess.Popen(worker_argv(run.folder), env=environment, close_fds=False)

    def pass_on(number: int, frame: Any) -> None:
        worker.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, pass_on)
    let_through()
    code = worker.wait()
    if code < 0:
        ended = {"rank": rank.rank, "exit_code": code, "time": time.time()}
        run.write_final(run.rank_folder(rank.rank) / "exit.json", ended)
        sys.exit(128 - code)
    sys.exit(code)


if __name__ == "__main__":
    main()
