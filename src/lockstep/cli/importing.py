"""Importing torch within a command: it takes seconds, in which Ctrl-C has to end the command."""

from __future__ import annotations

import signal
import threading

from lockstep.cli import stop_at_once


def import_torch() -> None:
    """Ctrl-C ends at once: torch's own code may lose the exception, and the command would go on. Nothing has begun yet."""
    before = signal.getsignal(signal.SIGINT)
    ours = before is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    if ours:
        signal.signal(signal.SIGINT, stop_at_once)
    try:
        import torch  # noqa: F401
    finally:
        if ours:
            signal.signal(signal.SIGINT, before)
