"""The door of the command line: it imports next to nothing, so that Ctrl-C is one line from the first moment on.

What is behind it is in commands.py.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

STOPPED = 130


def main() -> None:
    """The console script `lockstep`."""
    try:
        from lockstep.cli.commands import start

        code = start(sys.argv[1:])
    except KeyboardInterrupt:  # while modules are still being imported
        from contextlib import suppress

        with suppress(OSError):
            os.write(2, b"lockstep: stopped\n")
        code = STOPPED
    sys.exit(code)


def __getattr__(name: str) -> Any:
    """The group and the table of commands, for those who use them from Python."""
    if name in ("COMMANDS", "call", "cli"):
        from lockstep.cli import commands

        return getattr(commands, name)
    raise AttributeError(f"module 'lockstep.cli' has no attribute '{name}'")
