"""What the data room says while it works: on stderr, a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

# Off a terminal, one line of progress per this many seconds: enough to see life in a log, too few to fill it.
LINE_EVERY = 10.0


class Voice:
    """Notes are for the curious and can be silenced; warnings are always said."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet

    def note(self, text: str) -> None:
        if not self.quiet:
            _say(f"lockstep: {text}")

    def warn(self, text: str) -> None:
        _say(f"lockstep: warning: {text}")

    @contextlib.contextmanager
    def progress(self, label: str, done: int, total: int | None) -> Iterator[Callable[[int], None]]:
        """Yields a function to call with the number of bytes received so far."""
        if self.quiet:
            yield lambda _: None
        elif sys.stderr.isatty():
            with _bar(label, done, total) as update:
                yield update
        else:
            with _lines(label, done, total) as update:
                yield update


def megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def _say(text: str) -> None:
    # A closed stderr must never be the reason why data cannot be had.
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _bar(label: str, done: int, total: int | None) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total, completed=done)
        yield lambda count: bar.update(task, completed=count)


@contextlib.contextmanager
def _lines(label: str, done: int, total: int | None) -> Iterator[Callable[[int], None]]:
    of = f" of {megabytes(total)}" if total else ""
    resumed = f", going on from {megabytes(done)}" if done else ""
    _say(f"lockstep: {label}{of}{resumed}")
    last = time.monotonic()

    def update(count: int) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_EVERY:
            last = time.monotonic()
            _say(f"lockstep: {label}: {megabytes(count)}{of}")

    yield update
