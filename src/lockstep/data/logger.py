"""Messages and progress of downloads, on stderr: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from lockstep.files import to_stderr

# Without a terminal, one line of progress every N seconds: enough to see life in a log, too few to fill it.
LINE_EVERY = 10.0


class Logger:
    """`quiet` silences all but warnings."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet

    def info(self, text: str) -> None:
        if not self.quiet:
            _print(text)

    def warning(self, text: str) -> None:
        _print(f"warning: {text}")

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


def _print(text: str) -> None:
    # A closed stderr must never be the reason why a data set cannot be opened.
    with contextlib.suppress(OSError, ValueError):
        to_stderr(text)


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
    _print(f"{label}{of}{resumed}")
    last = time.monotonic()

    def update(count: int) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_EVERY:
            last = time.monotonic()
            _print(f"{label}: {megabytes(count)}{of}")

    yield update
