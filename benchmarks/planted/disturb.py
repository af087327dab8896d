"""Takes a rank's processor away for a share of the time, from a process beside it: `stop` stops the rank, `spin` is busy on its core.

It looks at one byte of a file: "1" is on, "0" is off, "x" ends it. So a script can switch it between two steps.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

CYCLE_S = 0.010


def main(how: str, pid: int, share: float, switch: Path) -> None:
    if how == "spin":
        os.sched_setaffinity(0, os.sched_getaffinity(pid))
    descriptor = os.open(switch, os.O_RDONLY)
    with suppress(ProcessLookupError):
        while (state := os.pread(descriptor, 1, 0)) != b"x":
            os.kill(pid, 0)
            if state == b"1":
                _take(how, pid, share * CYCLE_S)
            time.sleep((1 - share) * CYCLE_S)


def _take(how: str, pid: int, seconds: float) -> None:
    if how == "stop":
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)
        return
    # Its own processor time, not the wall's: what the rank gets in between does not count.
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4]))
