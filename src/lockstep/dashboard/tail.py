"""Following files that grow, by byte offset: whole lines only, from the start again where a file has been cut or replaced."""

from __future__ import annotations

import codecs
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep import shapes
from lockstep.dashboard.security import read_at
from lockstep.reading import Damaged, checked

MOST_BYTES = 1 << 20
TAIL_BYTES = 64 << 10


class Records:
    """A JSONL file of epochs, as far as it has been written: the latest record of each epoch."""

    def __init__(self, root: Path, path: Path) -> None:
        self._root, self._path = root, path
        self._offset, self._head = 0, b""
        self.epochs: dict[int, dict[str, Any]] = {}

    def look(self) -> bool:
        """Read on; whether anything has changed. A last line without its end is left for the next time."""
        head = read_at(self._root, self._path, 0, len(self._head))
        before = len(self.epochs)
        fresh = head != self._head
        if fresh:  # another file by that name, or a shorter one
            self._offset, self._head, self.epochs = 0, b"", {}
        data = read_at(self._root, self._path, self._offset, MOST_BYTES) or b""
        whole = data.rpartition(b"\n")[0]
        if not whole and len(data) == MOST_BYTES:
            self._offset += len(data)  # no record of ours is that long
            return False
        if not whole:
            return fresh and bool(before)
        if not self._offset:
            self._head = whole.partition(b"\n")[0]
        self._offset += len(whole) + 1
        for line in whole.split(b"\n"):
            self._add(line)
        return True

    def _add(self, line: bytes) -> None:
        with suppress(Damaged):
            record = checked(line, shapes.Epoch, self._path.name)
            self.epochs[record["epoch"]] = record


class Text:
    """The end of a log, and then what is added to it."""

    def __init__(self, root: Path, path: Path) -> None:
        self._root, self._path = root, path
        self._offset: int | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def look(self) -> tuple[str, bool] | None:
        """What is new, and whether it replaces what was there; None where nothing is new."""
        size = self._size()
        if size is None:
            return None
        again = self._offset is None or size < self._offset or size > self._offset + TAIL_BYTES
        if again:
            self._offset = max(0, size - TAIL_BYTES)
            self._decoder.reset()
        assert self._offset is not None
        data = read_at(self._root, self._path, self._offset, TAIL_BYTES) or b""
        if not data and not again:
            return None
        cut = again and self._offset > 0
        self._offset += len(data)
        if cut:
            data = data.partition(b"\n")[2] or data  # not from the middle of a line
        return self._decoder.decode(data), again

    def _size(self) -> int | None:
        if read_at(self._root, self._path, 0, 1) is None:
            return None
        try:
            return self._path.lstat().st_size
        except OSError:
            return None
