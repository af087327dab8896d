"""The errors a user can meet, each with the exit code that the command line gives it.

A message is one line: what is wrong, which option, how to fix it. Nothing that a user can cause shows a traceback.
"""

from __future__ import annotations


class LockstepError(Exception):
    """Base of every expected error; anything else that escapes is a bug of ours."""

    exit_code = 1

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows instead of a traceback: one line, as the command line does."""
        return [f"{type(self).__name__}: {self}"]


class InputError(LockstepError, ValueError):
    """The user asked for something that cannot be done: an option, a file, a combination."""

    exit_code = 2


class RunFailed(LockstepError):
    """A run started and did not finish; the message names the rank and the first cause."""

    exit_code = 3


class DataError(LockstepError):
    """Data that cannot be had or cannot be trusted; the message lists the places tried."""

    exit_code = 4


class RunCancelled(LockstepError):
    """Ctrl-C, or a request to stop: what was measured is kept."""

    exit_code = 130


class RunLeft(LockstepError):
    """Nobody follows the run any more, and it goes on: a batch job whose terminal was closed."""

    exit_code = 129


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or its kind if it says nothing."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
