"""Starting a contender: a fresh process with a stated number of threads, pinned to a core if wanted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_SECONDS = 1800


class ContenderFailed(Exception):
    """A contender did not give its result. The message holds no path: it goes into a published file."""


def last_core() -> int:
    """The core that contenders use, one after the other; the system itself favours the first one."""
    return max(os.sched_getaffinity(0))


def environment(threads: int | None) -> dict[str, str]:
    """Our environment with the threads of the maths libraries stated; None leaves them to the contender."""
    result = {key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    if threads is not None:
        result |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return result | {"PYTHONWARNINGS": "ignore", "NO_COLOR": "1"}


def run(
    command: Sequence[str],
    core: int | None = None,
    threads: int | None = None,
    more: Mapping[str, str] | None = None,
    where: Path = ROOT,
) -> str:
    """Run a command to its end and return its stdout; its stderr is shown only if it fails. `more`: variables of its environment."""

    def pin() -> None:
        if core is not None:
            os.sched_setaffinity(0, {core})

    try:
        # preexec_fn is safe here: this process has no other thread.
        done = subprocess.run(
            command,
            cwd=where,
            env=environment(threads) | dict(more or {}),
            preexec_fn=pin,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
    except FileNotFoundError:
        raise ContenderFailed(f"{Path(command[0]).name} is not installed") from None
    except subprocess.TimeoutExpired:
        raise ContenderFailed(f"not done after {TIMEOUT_SECONDS} s") from None
    if done.returncode:
        print(done.stderr[-4000:], file=sys.stderr)
        raise ContenderFailed(f"exit code {done.returncode}")
    return done.stdout


def parse_line(text: str) -> dict[str, Any]:
    """The JSON document on the last line, whatever a library printed before it."""
    lines = text.strip().splitlines()
    try:
        document = json.loads(lines[-1])
    except (IndexError, ValueError):
        raise ContenderFailed("no JSON on the last line of its output") from None
    if not isinstance(document, dict):
        raise ContenderFailed("the last line of its output is not a JSON document")
    return document
