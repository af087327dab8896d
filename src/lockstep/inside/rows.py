"""steps.bin and beside.bin, written without numpy: rows in memory-mapped files, which `kill -9` cannot take back. And what is logged, line by line."""

from __future__ import annotations

import json
import mmap
import os
import time

from .layout import ASIDES, ASIDES_FILE, BESIDE_FILE, BESIDE_ROW, HEAD, LOGGED_FILE, ROW_BYTES, STEP, WARMUP_STEPS

# The file grows by so many rows at a time.
GROWTH = 4096


class Rows:
    """The rows of a rank, and its counters. Raises OSError where the disk has no room."""

    def __init__(self, folder: str) -> None:
        """Makes the file. One that is there belongs to another process: FileExistsError."""
        self._path, self._beside_path = (os.path.join(folder, name) for name in ("steps.bin", BESIDE_FILE))
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        os.close(descriptor)
        self.count = self._room = 0
        os.close(os.open(self._beside_path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666))
        self._grow()
        self._logged = os.open(os.path.join(folder, LOGGED_FILE), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._asides = os.open(os.path.join(folder, ASIDES_FILE), os.O_RDWR | os.O_CREAT, 0o666)
        self.aside(0, 0)

    def _grow(self) -> None:
        self._room += GROWTH
        self._map = self._mapped(self._path, ROW_BYTES)
        self._beside = self._mapped(self._beside_path, BESIDE_ROW.size)

    def _mapped(self, path: str, row_bytes: int) -> mmap.mmap:
        with open(path, "r+b") as file:
            # Room on the disk is taken now: a full one is an error here, not a SIGBUS in the middle of a step.
            os.posix_fallocate(file.fileno(), 0, self._room * row_bytes)
            return mmap.mmap(file.fileno(), 0)

    def write(self, start: int, phases: list[int], total: int, beside: list[int], again: bool) -> None:
        """The row of the next step, or of the one before once more."""
        self.count += not again
        if self.count > self._room:
            self._grow()
        BESIDE_ROW.pack_into(self._beside, (self.count - 1) * BESIDE_ROW.size, *beside)
        offset = (self.count - 1) * ROW_BYTES
        HEAD.pack_into(self._map, offset, 0, 0, self.count <= WARMUP_STEPS, 0, start, *phases, total)
        STEP.pack_into(self._map, offset, self.count)

    def aside(self, evaluation: int, checkpoint: int) -> None:
        os.pwrite(self._asides, ASIDES.pack(evaluation, checkpoint), 0)

    def log(self, step: int, values: dict[str, float]) -> None:
        line = json.dumps({"step": step, "time": time.time(), "values": values})
        os.write(self._logged, f"{line}\n".encode())

    def close(self) -> None:
        """Cut the files to the rows that were written."""
        os.truncate(self._path, self.count * ROW_BYTES)
        os.truncate(self._beside_path, self.count * BESIDE_ROW.size)
