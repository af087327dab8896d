"""steps.bin, written without numpy: rows in a memory-mapped file, which `kill -9` cannot take back."""

from __future__ import annotations

import mmap
import os

from .layout import ASIDES, ASIDES_FILE, HEAD, ROW_BYTES, STEP, WARMUP_STEPS

# The file grows by so many rows at a time.
GROWTH = 4096


class Rows:
    """The rows of a rank, and its counters. Raises OSError where the disk has no room."""

    def __init__(self, folder: str) -> None:
        """Makes the file. One that is there belongs to another process: FileExistsError."""
        self._path = os.path.join(folder, "steps.bin")
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        os.close(descriptor)
        self.count = self._room = 0
        self._grow()
        self._asides = os.open(os.path.join(folder, ASIDES_FILE), os.O_RDWR | os.O_CREAT, 0o666)
        self.aside(0, 0)

    def _grow(self) -> None:
        self._room += GROWTH
        with open(self._path, "r+b") as file:
            # Room on the disk is taken now: a full one is an error here, not a SIGBUS in the middle of a step.
            os.posix_fallocate(file.fileno(), 0, self._room * ROW_BYTES)
            self._map = mmap.mmap(file.fileno(), 0)

    def write(self, start: int, phases: list[int], total: int, again: bool) -> None:
        """The row of the next step, or of the one before once more."""
        self.count += not again
        if self.count > self._room:
            self._grow()
        offset = (self.count - 1) * ROW_BYTES
        HEAD.pack_into(self._map, offset, 0, 0, self.count <= WARMUP_STEPS, 0, start, *phases, total)
        STEP.pack_into(self._map, offset, self.count)

    def aside(self, evaluation: int, checkpoint: int) -> None:
        os.pwrite(self._asides, ASIDES.pack(evaluation, checkpoint), 0)

    def close(self) -> None:
        """Cut the file to the rows that were written."""
        os.truncate(self._path, self.count * ROW_BYTES)
