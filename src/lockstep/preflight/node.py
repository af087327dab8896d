"""What a worker can say of its own node: who it is, what is installed, and how fast its cores, memory and folder are."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.machine.cpu import cpu_model
from lockstep.measure.environment import version_of
from lockstep.measure.memory import available_bytes

if TYPE_CHECKING:
    from torch import Tensor

SIZE = 384
"""Of the matrices: they fit into a core's own cache."""
FLOP = 2 * SIZE**3
# Copied by all cores of a node together: far more than its caches hold.
COPIED_BYTES, LEAST_BYTES = 256 << 20, 8 << 20
WRITTEN_BYTES = 8 << 20
HERE = "here"
"""What every node writes into its rank's folder."""


def name() -> str:
    return os.environ.get("SLURMD_NODENAME") or platform.node()


def facts(folder: Path, mine: Path, token: str) -> dict[str, Any]:
    import numpy
    import torch

    sees = False
    with suppress(OSError):
        sees = (folder / HERE).read_text() == token
    with suppress(OSError):
        (mine / HERE).write_text(token)
    there = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    shm = Path("/dev/shm")
    return {
        "cpu": cpu_model(),
        "cores": len(usable()),
        "memory_bytes": available_bytes(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "lockstep": version_of("lockstep"),
        "kernel": platform.release(),
        "sees_folder": sees,
        "disk_free_bytes": shutil.disk_usage(there).free,
        "shm_free_bytes": shutil.disk_usage(shm).free if shm.is_dir() else None,
    }


def usable() -> list[int]:
    """The cores that we may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def address() -> str:
    """Where other nodes reach this one: by gloo's rule, which trainings follow."""
    stated = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if not stated:
        return socket.gethostbyname(socket.gethostname())
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        found = fcntl.ioctl(probe, 0x8915, struct.pack("256s", stated.encode()[:15]))  # SIOCGIFADDR
    return socket.inet_ntoa(found[20:24])


def compute(cores: list[int], seconds: float) -> dict[str, Any]:
    """Matrix products on every core at once: GFLOP/s, and the share of the time that each core gave us."""
    import torch

    a, b = torch.rand(SIZE, SIZE), torch.rand(SIZE, SIZE)

    def work(place: int) -> dict[str, float]:
        torch.set_num_threads(1)  # of this thread
        out = torch.empty(SIZE, SIZE)
        torch.mm(a, b, out=out)
        used, count = time.thread_time(), 0
        begin = now = time.perf_counter()
        while not count or now - begin < seconds:  # once at least: a core may be gone for longer than that
            torch.mm(a, b, out=out)
            count, now = count + 1, time.perf_counter()
        took = now - begin
        return {"gflops": count * FLOP / took / 1e9, "granted": (time.thread_time() - used) / took}

    return {"cores": dict(zip(map(str, cores), on_each(cores, work), strict=True))}


def memory(cores: list[int], seconds: float) -> dict[str, Any]:
    """Copying on every core at once: GB/s of all of them, read and written."""
    import torch

    size = max(LEAST_BYTES, COPIED_BYTES // len(cores) // 2)

    def work(place: int) -> dict[str, float]:
        torch.set_num_threads(1)
        source, target = _buffers(place, size)
        count, begin = 0, time.perf_counter()
        now = begin
        while not count or now - begin < seconds:  # once at least: a core may be gone for longer than that
            target.copy_(source)
            count, now = count + 1, time.perf_counter()
        return {"gbs": 2 * size * count / (now - begin) / 1e9}

    return {"gbs": sum(found["gbs"] for found in on_each(cores, work))}


@cache
def _buffers(place: int, size: int) -> tuple[Tensor, Tensor]:
    """Of one core, made once: pages that are new would be timed too."""
    import torch

    return torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)


def on_each(cores: list[int], work: Callable[[int], dict[str, float]]) -> list[dict[str, float]]:
    """The same work on each core, at the same time: a thread for each, which stays there."""
    found: list[dict[str, float] | BaseException] = [{}] * len(cores)
    ready = threading.Barrier(len(cores))

    def run(place: int) -> None:
        try:
            with suppress(OSError, AttributeError):
                os.sched_setaffinity(0, {cores[place]})
            ready.wait()
            found[place] = work(place)
        except BaseException as error:
            ready.abort()
            found[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(cores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return [each for each in found if isinstance(each, dict)]


def disk(mine: Path) -> dict[str, Any]:
    """Writing into the shared folder until it is there, and making a small file as runs do."""
    path, data = mine / "written", os.urandom(1 << 20)
    begin = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(WRITTEN_BYTES >> 20):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    wrote = time.perf_counter() - begin
    path.unlink()
    begin = time.perf_counter()
    (mine / "small.tmp").write_text("{}")
    (mine / "small.tmp").replace(mine / "small")
    return {"mbs": WRITTEN_BYTES / wrote / 1e6, "create_ms": (time.perf_counter() - begin) * 1e3}
