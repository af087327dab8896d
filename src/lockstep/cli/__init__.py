"""The command line: one file per command, each imported only when it is asked for.

May import every room. Its door is `main`, which itself imports next to nothing, so that Ctrl-C is one line from the first moment on;
what is behind it is in commands.py.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

STOPPED = 130


def main() -> None:
    """The console script `lockstep`."""
    try:
        import signal

        before = signal.getsignal(signal.SIGINT)
        if before is signal.default_int_handler:  # else whoever started us wants it ignored
            signal.signal(signal.SIGINT, stop_at_once)
        from lockstep.cli.commands import start

        signal.signal(signal.SIGINT, before)
        code = start(sys.argv[1:])
    except KeyboardInterrupt:  # before the handler is there
        stop_at_once()
    sys.exit(code)


def stop_at_once(*signal_and_frame: object) -> NoReturn:
    """End at once. Nothing has begun, and an exception could be lost: importlib runs callbacks that print it and go on."""
    try:
        os.write(2, b"lockstep: stopped\n")
    finally:
        os._exit(STOPPED)
