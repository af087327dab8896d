"""Calls Lockstep with hostile input, in this process: whatever is neither an answer nor one of its own errors is a failure, and so is a hang.

Nothing is started: where a command would start a process, open a connection or serve, it is stopped short of it, as Ctrl-C would.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import socket
import socketserver
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, NoReturn

import pytest
from hypothesis import HealthCheck, Phase, settings

from lockstep.cli import commands as cli
from lockstep.errors import LockstepError, RunCancelled

# All targets together; `make fuzz` sets more. The share of each target is in SHARES.
INPUTS = int(os.environ.get("FUZZ_INPUTS") or 400)
LONG = "FUZZ_INPUTS" in os.environ
# Far more than any input takes, on a machine with other work too.
PATIENCE_S = 60.0
CODES = (0, 2, 3, 4, 130)
SHARES = {
    "words": 0.42,
    "recipe files": 0.18,
    "study files": 0.07,
    "command lines": 0.12,
    "run folders": 0.06,
    "study folders": 0.02,
    "archives": 0.10,
    "checkpoints": 0.03,
}
COUNTS: Counter[str] = Counter()
CALLS: Counter[str] = Counter()
CODES_SEEN: Counter[int] = Counter()
FAILED: Counter[str] = Counter()


class Hang(BaseException):
    """An input took longer than any should."""


def examples(target: str) -> settings:
    """How hypothesis looks for inputs: the same ones each time by default, others each time in the long run."""
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
    return settings(
        max_examples=max(10, round(INPUTS * SHARES[target])),
        deadline=None,
        derandomize=not LONG,
        database=None,
        suppress_health_check=slow,
        phases=[Phase.explicit, Phase.generate, Phase.shrink] if LONG else [Phase.explicit, Phase.generate],
        print_blob=LONG,
    )


def count(target: str) -> None:
    """One more input. A damaged folder is one, however many views look at it."""
    COUNTS[target] += 1


@contextmanager
def watched() -> Iterator[None]:
    """A call with an input: ended where it hangs."""
    CALLS["calls"] += 1

    def over(number: int, frame: Any) -> NoReturn:
        raise Hang(f"no answer after {PATIENCE_S:.0f} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)
    try:
        yield
    except BaseException as error:
        FAILED["hangs" if isinstance(error, Hang) else "tracebacks"] += 1
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


STOPPED = "the fuzzer stops here: a process would start"


def command(*words: str) -> str:
    """The command line with these words; returns what it wrote. Output is strict UTF-8, as it is in a process."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with watched(), redirect_stdout(out), redirect_stderr(err):
        try:
            code = cli.call(words)
        except Exception as error:
            if STOPPED not in str(error):
                raise
            code = RunCancelled.exit_code  # torch's compiler gives another name to what stops it
    CODES_SEEN[code] += 1
    wrote = "".join(stream.buffer.getvalue().decode() for stream in (out, err))  # type: ignore[attr-defined]
    assert code in CODES, (words, code, wrote)
    assert "Traceback" not in wrote, (words, wrote)
    assert not set(wrote) & set("\x1b\x07\x9b"), (words, wrote)
    return wrote


def answer(function: Callable[[], Any]) -> Any:
    """What a function gives, or the error of ours that it raises; nothing else is borne."""
    with watched():
        try:
            return function()
        except LockstepError as error:
            return error


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*args: Any, **more: Any) -> NoReturn:
        raise RunCancelled(STOPPED)

    def unreachable(*args: Any, **more: Any) -> NoReturn:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(subprocess.Popen, "__init__", stopped)
    monkeypatch.setattr(subprocess.Popen, "__del__", lambda self: None)
    monkeypatch.setattr(os, "fork", stopped)
    monkeypatch.setattr(socket.socket, "connect", unreachable)
    monkeypatch.setattr(socketserver.BaseServer, "serve_forever", stopped)
    monkeypatch.setenv("NO_COLOR", "1")
