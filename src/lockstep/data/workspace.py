"""The folder in which a data set is prepared, and what happens to files that turn out to be bad."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def working_folder(parent: Path) -> Iterator[Path]:
    """An empty folder below `parent`, gone afterwards. Only for the holder of the lock that guards `parent`.

    Whatever is found in `parent` was left by a holder that was killed: only one holder exists at a time,
    and it is us.
    """
    shutil.rmtree(parent, ignore_errors=True)
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(parent, ignore_errors=True)


def set_aside(path: Path) -> Path:
    """Rename a bad file to `*.corrupt` (numbered where that is taken), so that it is kept but never used."""
    target = path.with_name(path.name + ".corrupt")
    number = 1
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}.corrupt.{number}")
    path.rename(target)
    return target
