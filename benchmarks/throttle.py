"""Takes a share of its processor away from one rank of a run: it is stopped and let go, again and again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

from benchmarks.processes import ContenderFailed

CYCLE_S = 0.002


def throttled(argv: list[str], run: Path, rank: int, stopped: float = 0.5) -> str:
    """What the command prints, with the rank of its run stopped for this share of every cycle, from its first status on."""
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    status = run / "ranks" / f"{rank:04d}" / "status.json"
    over = threading.Event()

    def throttle() -> None:
        while not over.is_set() and not status.exists():
            time.sleep(0.005)
        with suppress(ProcessLookupError, OSError):
            pid = int(json.loads(status.read_text())["pid"])
            while not over.is_set():
                os.kill(pid, signal.SIGSTOP)
                time.sleep(CYCLE_S * stopped)
                os.kill(pid, signal.SIGCONT)
                time.sleep(CYCLE_S * (1 - stopped))

    helper = threading.Thread(target=throttle, daemon=True)
    helper.start()
    output, errors = process.communicate()
    over.set()
    if process.returncode:
        raise ContenderFailed(errors.strip().splitlines()[-1] if errors.strip() else f"exit code {process.returncode}")
    return output
