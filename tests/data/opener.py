"""A process of its own that opens the usual small set: `opener.py MIRROR COUNT_FILE [trick]`.

Every decoding is one line in COUNT_FILE. A trick makes it slow, or kills it, at a chosen point.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import datahelp

from lockstep.data import catalog, collect, open_data, resident, store
from lockstep.data.download import RetryPolicy

mirror, count_file = sys.argv[1], Path(sys.argv[2])
trick = sys.argv[3] if len(sys.argv) > 3 else ""
catalog.CATALOG["mini"] = datahelp.mini((mirror,))[0]
collect.RETRY_POLICY = RetryPolicy(attempts=3, backoff=0.05, timeout=10)
decode, write, replace = store.to_arrays, resident.write, Path.replace


def counted(*arguments: Any) -> Any:
    with count_file.open("a") as stream:
        stream.write("decoded\n")
    if trick == "slow":
        time.sleep(2.5)
    return decode(*arguments)


def stuck(folder: Path, *arguments: Any) -> None:
    write(folder, *arguments)
    (folder / "test-labels.npy").write_bytes(b"half")
    print("stuck", flush=True)
    time.sleep(60)


def fatal(path: Path, target: Path) -> Path:
    """Die between the first and the second file that go into their place."""
    if path.name == "train-labels.npy":
        os.kill(os.getpid(), signal.SIGKILL)
    return replace(path, target)


store.to_arrays = counted
if trick == "stuck":
    resident.write = stuck
if trick == "fatal":
    Path.replace = fatal  # type: ignore[method-assign, assignment]

data = open_data("mini")
print(data.train_images.shape, int(data.train_images.sum()), data.folder, flush=True)
