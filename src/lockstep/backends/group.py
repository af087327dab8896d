"""The process group: making it, and leaving it so that no rank aborts at the door."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from lockstep.backends.ranks import Rank
from lockstep.placement import Placement
from lockstep.torch_private import FileStore, PrefixStore, Store, default_store

# How the backends say that a connection broke or that nobody answered in time.
PEER_LOSS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Timed out waiting",
    "Wait timeout",
    "Socket Timeout",
    "recvValue failed",
    "sendBytes failed",
    "NCCL communicator was aborted",
)

# Backends of our own: the module whose `register` makes one known to torch, and returns the name that torch has for it.
OWN = {"mpi": "lockstep.backends.mpi.group", "shm": "lockstep.backends.shm.group"}


def join(placement: Placement, rank: Rank, folder: Path) -> None:
    """Meet the other ranks. On one host that we started ourselves they meet in a file: no port can be taken."""
    timeout = timedelta(seconds=placement.timeout_s)
    backend = _registered(placement.backend)
    between_hosts = placement.launcher == "ray" and placement.hosts > 1
    if placement.launcher in ("torchrun", "slurm") or between_hosts:  # MASTER_ADDR and MASTER_PORT are set
        shared, _, _ = next(rendezvous("env://", rank.rank, rank.world, timeout=timeout))
        # torchrun keeps its store when it starts the ranks again; the addresses of the dead ones must not be found in it.
        store: Store = PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", shared)
    else:
        store = FileStore(str(folder / "rendezvous"), rank.world)
    store.set_timeout(timeout)
    dist.init_process_group(backend, store=store, rank=rank.rank, world_size=rank.world, timeout=timeout)
    _calm_gloo()


def _registered(backend: str) -> str:
    """torch's name of a backend; ours are made known to it first."""
    if backend not in OWN:
        return backend
    name: str = importlib.import_module(OWN[backend]).register()
    return name


def _calm_gloo() -> None:
    """Keep gloo's polling thread from holding the core that its own rank waits for.

    The thread `gloo_tcp_loop` polls, so on a pinned core the kernel lets the threads that it has just woken wait for its
    time slice, up to 4 ms. As a batch thread it gives way at once: an all-reduce of 17 KB between two pinned ranks fell
    from 1.7 ms to 0.35 ms in the mean (docs/placements.md). No privilege is needed; elsewhere than on Linux nothing is done.
    """
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError, ValueError):
            if (task / "comm").read_text().strip() == "gloo_tcp_loop":
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))


def leave() -> None:
    """Part together. Without the collection and the barrier, gloo aborts in about one exit of ten (measured)."""
    if dist.is_initialized():
        gc.collect()
        dist.barrier()
        dist.destroy_process_group()


_alone = count()


def first_alone(work: Callable[[], None]) -> None:
    """The first rank does something for all (writes a file); the others wait for it, however long it takes. Collective.

    They do not wait in a collective: that has a timeout, by which ranks that compute alike notice one that does not come, and
    how long a disk takes says nothing about that. If the first rank dies meanwhile, its launcher ends the others.
    """
    if not dist.is_initialized():
        work()
        return
    store, key = default_store(), f"alone-{next(_alone)}"
    if dist.get_rank() == 0:
        work()
        store.set(key, "done")
        return
    pause = 0.001
    while not store.check([key]):
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def exit_now(code: int) -> None:
    """End this rank at once after an error; joining threads that wait for a dead peer would hang."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def reduce_sum(values: list[float]) -> list[float]:
    """Sums over all ranks, in float64; the values themselves where there is one rank."""
    return _reduce(values, dist.ReduceOp.SUM)


def reduce_max(values: list[float]) -> list[float]:
    return _reduce(values, dist.ReduceOp.MAX)


def _reduce(values: list[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
    if not dist.is_initialized():
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=_device())
    dist.all_reduce(tensor, operation)
    result: list[float] = tensor.tolist()
    return result


def _device() -> torch.device:
    return torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")


def is_peer_loss(error: BaseException) -> bool:
    """Whether an error only says that another rank went away: a consequence, not the first cause."""
    text = str(error)
    return isinstance(error, RuntimeError) and any(sign in text for sign in PEER_LOSS)


def message_of(error: BaseException) -> str:
    """Its first line, without what torch puts before an error that it got through a future (backends/work.py).

    Torch's compiler says only there that it failed ("backend='inductor' raised:") and quotes the C++ compiler below: of that, the first
    error is added. Where a first line ends in a colon otherwise, the next one is.
    """
    first, *rest = str(error).splitlines() or [""]
    quoted = [line.strip() for line in rest if " error: " in line]
    announced = [line.strip() for line in rest if line.strip()] if first.endswith(":") else []
    for line in (quoted or announced)[:1]:
        first = f"{first.removesuffix(':')}: {line}"
    return first.removeprefix("Got the following error when running the callback: RuntimeError: ")


def gather(values: list[float]) -> list[list[float]]:
    """Every rank's values, in the order of ranks, on every rank."""
    return [row.tolist() for row in gather_tensor(torch.tensor(values, dtype=torch.float64))]


def gather_tensor(mine: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's tensor, in the order of ranks, on every rank and on the CPU."""
    if not dist.is_initialized():
        return [mine]
    mine = mine.to(_device()).contiguous()
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return [tensor.cpu() for tensor in every]
