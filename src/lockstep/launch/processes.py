"""Starting the processes of a run, and ending them so that none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from lockstep.launch.base import Start
from lockstep.process import PARENT

KILL_AFTER_S = 2.0


class CannotStart(Exception):
    """The system refused to start a process."""


def begin(start: Start, cores: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """`cores`: what the environment says about them (launch/cores.py)."""
    environment = {**start.defaults, **os.environ, **start.environment, **cores, PARENT: str(os.getpid())}
    with log.open("ab") as file:
        try:
            # A session of its own: Ctrl-C at the terminal reaches us, and we end the ranks in order.
            return subprocess.Popen(
                start.argv, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
        except OSError as error:
            what = f"rank {start.rank}" if start.rank is not None else start.what
            raise CannotStart(f"cannot start {what} ({start.argv[0]}): {error.strerror}") from None


def end_all(processes: Iterable[subprocess.Popen[bytes]], kill_after_s: float = KILL_AFTER_S) -> None:
    """SIGTERM, then SIGKILL, to each process group that is still there."""
    left = list(processes)
    for sign in (signal.SIGTERM, signal.SIGKILL):
        left = [process for process in left if process.poll() is None]
        for process in left:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, sign)
        until = time.monotonic() + kill_after_s
        for process in left:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
