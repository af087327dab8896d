"""Follow files that grow: whether any of them has changed, and what was appended to a log."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path

from lockstep.dashboard.security import read_at

TAIL_BYTES = 64 << 10


class Changes:
    """Small files that are read anew when one of them has changed."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._seen: list[tuple[int, int] | None] = []

    def look(self) -> bool:
        """Whether any has changed since the last look."""
        before, self._seen = self._seen, [_stamp(path) for path in self._paths]
        return self._seen != before


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


class Text:
    """The end of a log, then what is appended to it."""

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
            data = data.partition(b"\n")[2] or data  # do not start in the middle of a line
        return self._decoder.decode(data), again

    def _size(self) -> int | None:
        if read_at(self._root, self._path, 0, 1) is None:
            return None
        try:
            return self._path.lstat().st_size
        except OSError:
            return None
