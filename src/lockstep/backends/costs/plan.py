"""What is measured: collectives, message sizes, and the bandwidths as nccl-tests defines them. No torch here."""

from __future__ import annotations

import importlib.util
from typing import Any

import msgspec

from lockstep.errors import InputError
from lockstep.machine import shared_memory
from lockstep.machine.cores import cores
from lockstep.machine.cuda import cuda_present
from lockstep.placement import Placement

BACKENDS = ("gloo", "mpi", "shm", "nccl")
COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "gather",
    "scatter",
    "all_to_all",
    "send_recv",
    "barrier",
)
OWN, OWN_WITHIN = "own", "own_within"
"""An all-reduce of the user's own, and the same on a tensor that is a part of a larger one."""
# Their message is one buffer divided over the ranks: S of nccl-tests is the whole of it.
DIVIDED = ("all_gather", "reduce_scatter", "gather", "scatter", "all_to_all")

SMALLEST, LARGEST = 4, 64 << 20
MNIST_GRADIENTS = 17_064
QUICK_SIZES = (4, 1 << 10, MNIST_GRADIENTS, 1 << 20)
FLOAT = 4


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks of one backend are told at their start."""

    placement: Placement
    own: str | None = None
    messages_alone: bool = False
    """Whether `own` may use messages between two ranks alone, and no collective."""


def sizes(largest: int = LARGEST, quick: bool = False) -> list[int]:
    """4 B, 16 B, 64 B … in powers of 4, and the gradients of the MNIST net."""
    if largest < SMALLEST:
        raise InputError(f"--max-bytes {largest}: the smallest message is {SMALLEST} bytes (one float32)")
    powers = [SMALLEST * 4**k for k in range(13)]
    wanted = QUICK_SIZES if quick else (*powers, MNIST_GRADIENTS)
    return sorted(size for size in wanted if size <= largest)


def elements(collective: str, size: int, ranks: int) -> int:
    """Float32 values in the whole message; a divided one is rounded up so that every rank has as many."""
    if collective == "barrier":
        return 0
    if family(collective) in DIVIDED:
        return ranks * -(-size // (FLOAT * ranks))
    return -(-size // FLOAT)


def message_bytes(collective: str, size: int, ranks: int) -> int:
    """The bytes that are really in the message: the S of the bandwidths."""
    return FLOAT * elements(collective, size, ranks)


def family(collective: str) -> str:
    """The collective that a list form or the user's own is a form of."""
    return "all_reduce" if collective in (OWN, OWN_WITHIN) else collective.removesuffix("_list")


def bus_factor(collective: str, ranks: int) -> float:
    """What nccl-tests multiplies the algorithm bandwidth with, so that it can be compared with the hardware's."""
    name = family(collective)
    if name == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if name in DIVIDED:
        return (ranks - 1) / ranks
    return 1.0  # broadcast, reduce, send_recv


def bandwidths(collective: str, size: int, ranks: int, seconds: float) -> tuple[float, float] | None:
    """Algorithm and bus bandwidth in GB/s (1e9 bytes); None for a barrier, which moves no data."""
    moved = message_bytes(collective, size, ranks)
    if not moved or seconds <= 0:
        return None
    algorithm = moved / seconds / 1e9
    return algorithm, algorithm * bus_factor(collective, ranks)


def missing(backend: str, device: str) -> str | None:
    """Why a backend is not on this machine, as far as that shows without starting it; None if it may work."""
    if (device == "cuda" or backend == "nccl") and not cuda_present():
        return "no usable CUDA on this machine"
    if backend == "mpi" and importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed: pip install 'lockstep-bench[mpi]'"
    if backend == "shm" and (reason := shared_memory.problem()):
        return f"it {reason}"
    return None


def placement_for(backend: str, device: str, ranks: int, timeout_s: float, where: Placement | None = None) -> Placement:
    """Where the ranks of one backend run: on this host, started by the launcher that the backend needs; or as `where` says."""
    where = where or Placement()
    launcher = where.launcher if where.launcher != "auto" else "mpirun" if backend == "mpi" else "spawn"
    sharing = ranks if where.emulated else max(1, ranks // where.hosts)
    words: dict[str, Any] = {"backend": backend, "device": device, "launcher": launcher, "ranks": ranks}
    return msgspec.structs.replace(
        where,
        **words,
        threads=where.threads or max(1, cores() // sharing),
        strategy="ddp",
        memory_format="contiguous",
        timeout_s=timeout_s,
    )
